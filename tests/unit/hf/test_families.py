"""Families of transformers with random parameters: a run has those of a plain loop in float64, whole and cut.

Some compute in float32 here and there, whatever the parameters are in, so that rounding shows by the cut.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from evenstep import Logging, MapData, Task, Trainer, Training
from evenstep.integrations.hf import CausalLM, Classification, Seq2Seq

from .conftest import DOCUMENTS, T5

Made = Callable[..., nn.Module]
Settings = dict[str, Any]

UPDATES = 3
ROUNDING = 1e-14
FLOAT32 = 1e-8  # of steps of 1e-2

_KEYS: Settings = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NORMAL: Settings = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GPT: Settings = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
_PLACES: Settings = {"max_position_embeddings": 64}
_BERT: Settings = {**_NORMAL, **_PLACES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MARKED: Settings = {**_BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_STILL: Settings = {"dropout": 0.0, "attention_dropout": 0.0}
_T5: Settings = {name: value for name, value in T5.items() if name != "model_type"}
_BART: Settings = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **_STILL,
}
_EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_IMAGE: Settings = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 3}


class Family(NamedTuple):
    """Args: its settings; what it is trained on; how far a cut may be off; whether it is in the fast suite."""

    kind: str
    settings: Settings
    apart: float = ROUNDING
    fast: bool = False


def of(kind: str, model_type: str, settings: Settings, apart: float = ROUNDING, *, fast: bool = False) -> Family:
    return Family(kind, {"model_type": model_type, **settings}, apart, fast)


def each(kind: str, names: str, settings: Settings, apart: float = ROUNDING) -> list[Family]:
    return [of(kind, name, settings, apart) for name in names.split()]


FAMILIES = [
    of("CausalLM", "gpt2", _GPT, fast=True),
    of("CausalLM", "gptj", {**_GPT, "rotary_dim": 4}, FLOAT32),
    *each("CausalLM", "llama qwen2 phi3 olmo2 glm granite", {**_NORMAL, **_KEYS}),
    *each("CausalLM", "gemma3_text qwen3", {**_NORMAL, **_KEYS, "head_dim": 8}, FLOAT32),
    of("CausalLM", "mistral", {**_NORMAL, **_KEYS, "sliding_window": 4}),
    *each("CausalLM", "gpt_neox phi", {**_NORMAL, **_PLACES}),
    of("CausalLM", "bloom", {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    of("CausalLM", "mamba", {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, FLOAT32),
    of("CausalLM", "mixtral", {**_NORMAL, **_KEYS, "num_local_experts": 4}),
    of("CausalLM", "qwen3_moe", {**_NORMAL, **_KEYS, **_EXPERTS, "head_dim": 8}),
    *each("Seq2SeqLM", "t5 mt5", _T5),
    *each("Seq2SeqLM", "bart mbart marian", _BART),
    *each("MaskedLM", "bert roformer", _BERT),
    *each("MaskedLM", "roberta xlm-roberta", _MARKED),
    of("MaskedLM", "albert", {**_BERT, "embedding_size": 16}, fast=True),
    of("MaskedLM", "deberta", {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, FLOAT32),
    of("MaskedLM", "modernbert", {**_NORMAL, **_KEYS, **_PLACES, "cls_token_id": 1, "sep_token_id": 2}),
    of("SequenceClassification", "llama", {**_NORMAL, **_KEYS}),
    *each("ImageClassification", "vit beit", {**_BERT, **_IMAGE, "drop_path_rate": 0.0}),
]


def filled(rows: Sequence[list[int]], value: int = 0) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(one) for one in rows], batch_first=True, padding_value=value)


def collate(kind: str) -> Callable[[list[int]], dict[str, Tensor]]:
    """What makes a batch of samples by their numbers, of what such models are trained on."""

    def batch(numbers: list[int]) -> dict[str, Tensor]:
        documents = [DOCUMENTS[number] for number in numbers]
        if kind == "ImageClassification":
            drawn = [torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(n)) for n in numbers]
            return {"pixel_values": torch.stack(drawn).double(), "labels": torch.tensor(numbers) % 2}
        tokens = filled(documents)
        given = {"input_ids": tokens, "attention_mask": (tokens > 0).long()}
        labels = {
            "CausalLM": lambda: filled(documents, -100),
            "Seq2SeqLM": lambda: filled([one[1::-1] for one in documents], -100),
            "MaskedLM": lambda: filled([[t if t % 2 else -100 for t in one] for one in documents], -100),
            "SequenceClassification": lambda: torch.tensor(numbers) % 2,
        }
        return {**given, "labels": labels[kind]()}

    return batch


def plain(model: Any, kind: str) -> Tensor:
    """The parameters after a loop by hand, each update of 8 samples at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for update in range(UPDATES):
        batch = collate(kind)([*range(8 * update, 8 * update + 8)])
        labels = batch["labels"]
        more = {"labels": labels} if kind == "Seq2SeqLM" else {}  # for the decoder's inputs
        given = {name: one for name, one in batch.items() if name != "labels"}
        scores = model(**given, **more)["logits"]
        if kind == "CausalLM":
            scores, labels = scores[:, :-1], labels[:, 1:]
        loss = cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum")
        optimizer.zero_grad()
        (loss / (labels != -100).sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def trained(model: nn.Module, kind: str, micro_batch_size: int) -> Tensor:
    task: Task = {"CausalLM": CausalLM, "Seq2SeqLM": Seq2Seq}.get(kind, Classification)()
    numbers = [*range(8 * UPDATES)]
    Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data=MapData(
            numbers, global_batch_size=8, micro_batch_size=micro_batch_size, shuffle=False, collate=collate(kind)
        ),
        updates=UPDATES,
        device="cpu",
        train=Training(clip_norm=1.0),
        log=Logging(writers=()),
    ).train()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, id=f"{one.settings['model_type']}-{one.kind}", marks=() if one.fast else pytest.mark.slow)
        for one in FAMILIES
    ],
)
@pytest.mark.filterwarnings("ignore")  # what the libraries say of their own settings
def test_a_family_has_the_parameters_of_a_plain_loop_whole_and_cut(made: Made, family: Family) -> None:
    experts = {"experts_implementation": "eager"} if "experts" in str(family.settings) else {}  # else in float32 only

    def model() -> nn.Module:
        return made({**family.settings, **experts}, kind=family.kind).train()

    wanted = plain(model(), family.kind)
    for size in (8, 3):
        apart = float((trained(model(), family.kind, size) - wanted).abs().max())
        assert apart < (ROUNDING if size == 8 else family.apart), f"{apart:.1e} apart in micro-batches of {size}"
