"""Families of transformers with random parameters: the run of a plain loop in float64, whole, cut and in stages.

Some compute in float32 here and there, whatever the parameters are in, so that rounding shows by the cut.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kit
from evenstep import MapData, PipelineModel, Task, Training
from evenstep.errors import ArgumentError
from evenstep.integrations.hf import CausalLM, Classification, Seq2Seq, layers_of
from evenstep.parallel import Mesh, Single
from refused import refused

from .conftest import DOCUMENTS, LLAMA, T5, VOCABULARY
from .test_language import padded

Made = Callable[..., nn.Module]
Settings = dict[str, Any]

UPDATES = 3
ROUNDING = 1e-14
FLOAT32 = 1e-8  # of steps of 1e-2

_NORMAL: Settings = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LLAMA: Settings = {**_NORMAL, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_GPT2: Settings = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
_BERT: Settings = {**_NORMAL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5: Settings = {name: value for name, value in T5.items() if name != "model_type"}
_IMAGE: Settings = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 3}


class Family(NamedTuple):
    """Args: its name; what it is trained on; its settings; how far apart a cut may be; whether it is in `make test`."""

    name: str
    kind: str
    settings: Settings
    apart: float = ROUNDING
    fast: bool = False


FAMILIES = [
    Family("gpt2", "CausalLM", _GPT2, fast=True),
    *(Family(name, "CausalLM", _LLAMA) for name in ("llama", "qwen2", "phi3", "olmo2", "glm", "granite")),
    *(Family(name, "CausalLM", {**_LLAMA, "head_dim": 8}, FLOAT32) for name in ("gemma3_text", "qwen3")),
    Family("mistral", "CausalLM", {**_LLAMA, "sliding_window": 4}),
    Family("gpt_neox", "CausalLM", _NORMAL),
    Family("mamba", "CausalLM", {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}, FLOAT32),
    Family("mixtral", "CausalLM", {**_LLAMA, "num_local_experts": 4}),
    *(Family(name, "Seq2SeqLM", _T5) for name in ("t5", "mt5")),
    Family("bert", "MaskedLM", _BERT),
    Family("albert", "MaskedLM", {**_BERT, "embedding_size": 16}, fast=True),
    Family("deberta", "MaskedLM", {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, FLOAT32),
    Family("modernbert", "MaskedLM", {**_LLAMA, "cls_token_id": 1, "sep_token_id": 2}),
    Family("llama", "SequenceClassification", _LLAMA),
    *(Family(name, "ImageClassification", {**_BERT, **_IMAGE, "drop_path_rate": 0.0}) for name in ("vit", "beit")),
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


def trained(model: nn.Module, kind: str, micro: int) -> Tensor:
    task: Task = {"CausalLM": CausalLM, "Seq2SeqLM": Seq2Seq}.get(kind, Classification)()
    numbers = [*range(8 * UPDATES)]
    data = MapData(numbers, global_batch_size=8, micro_batch_size=micro, shuffle=False, collate=collate(kind))
    kit.trainer_of(model, task=task, data=data, updates=UPDATES, train=Training(clip_norm=1.0)).train()
    return kit.flat(model)


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, id=f"{one.name}-{one.kind}", marks=() if one.fast else pytest.mark.slow) for one in FAMILIES],
)
@pytest.mark.filterwarnings("ignore")  # what the libraries say of their own settings
def test_a_family_has_the_parameters_of_a_plain_loop_whole_and_cut(made: Made, family: Family) -> None:
    experts = {"experts_implementation": "eager"} if "experts" in str(family.settings) else {}  # else in float32 only

    def model() -> nn.Module:
        return made({"model_type": family.name, **family.settings, **experts}, kind=family.kind).train()

    wanted = plain(model(), family.kind)
    for size in (8, 3):
        apart = float((trained(model(), family.kind, size) - wanted).abs().max())
        assert apart < (ROUNDING if size == 8 else family.apart), f"{apart:.1e} apart in micro-batches of {size}"


GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
MODELS = {"gpt2": GPT2, "llama": LLAMA, "qwen2": {**LLAMA, "model_type": "qwen2", **SLIDING}}


def staged_run(model: nn.Module, strategy: Any = None) -> dict[str, Tensor]:
    rows = [[(7 * n + 3 * k) % 48 + 1 for k in range(3 + n % 4)] for n in range(8)]
    samples = [{name: one[0] for name, one in padded([row + [0] * (6 - len(row))]).items()} for row in rows]
    trainer = kit.trainer_of(
        model,
        task=CausalLM(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data=MapData(samples, global_batch_size=4, micro_batch_size=2),
        updates=2,
        strategy=strategy,
    )
    trainer.train()
    return trainer.state_dict()["model"]


def assert_same(staged: dict[str, Tensor], whole: dict[str, Tensor], *, tied: bool) -> None:
    """Copies of a tied parameter sum their gradients after all micro-batches, so its last bits differ."""
    assert staged.keys() == whole.keys()
    for name, value in staged.items():
        assert torch.equal(value, whole[name]) or (tied and torch.allclose(value, whole[name], rtol=1e-12))


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_one_process_have_the_bits_and_names_of_the_whole_model(made: Made, name: str) -> None:
    whole, staged = (made(MODELS[name], tie_word_embeddings=False) for _ in range(2))
    assert_same(staged_run(PipelineModel(layers_of(staged), stages_per_rank=2)), staged_run(whole), tied=False)


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_have_the_bits_of_one_process(made: Made, on_ranks: Any, tied: bool) -> None:
    whole, *models = (made(LLAMA, tie_word_embeddings=tied) for _ in range(3))

    def act(group: Any) -> dict[str, Tensor]:
        mesh = Mesh.of(group, pipeline=2)
        return staged_run(PipelineModel(layers_of(models[group.rank]), mesh=mesh), Single(mesh.data))

    assert_same(on_ranks(2, act)[0], staged_run(whole), tied=tied)


def test_models_of_other_classes_are_refused(made: Made) -> None:
    with refused(ArgumentError, "model"):
        layers_of(made(T5, kind="Seq2SeqLM"))
