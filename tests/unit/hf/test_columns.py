"""Columns of tokens that a model would ignore are refused by name; what it is called with is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep.errors import DataError, TaskError
from evenstep.hf import CausalLM, Classification, Packing, Seq2Seq
from evenstep.hf.columns import names_taken

from .conftest import DOCUMENTS, LLAMA, T5
from .test_classification import BERT
from .test_language import nats_of, padded, summed

Made = Callable[..., nn.Module]


def masked(name: str) -> dict[str, Tensor]:
    batch = padded(DOCUMENTS[:4])
    return {**batch, name: (torch.arange(batch["input_ids"].shape[1]) > 1).expand_as(batch["input_ids"]).long()}


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "atention_mask"])
def test_a_mask_that_the_model_would_ignore_is_refused_by_its_name(made: Made, name: str) -> None:
    models = {
        CausalLM(): made(LLAMA),
        Seq2Seq(): made(T5, kind="Seq2SeqLM"),
        Classification(): made({**BERT, "num_labels": 50}, kind="TokenClassification"),
    }
    for task, model in models.items():
        task.prepare(model)
        with pytest.raises(TaskError, match=rf"^`{name}` of the batch .*{type(model).__name__} .* would ignore it"):
            task.weight(masked(name))


def test_the_advice_trains_what_the_mask_is_meant_to_say(made: Made) -> None:
    model, batch = made(LLAMA), masked("completion_mask")
    mask = batch.pop("completion_mask")
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    wanted = sum(float(nats_of(model, document)[1:].sum()) for document in DOCUMENTS[:4])
    assert summed(model, CausalLM(), batch) == pytest.approx(wanted, rel=1e-12)


def test_what_the_model_takes_and_what_tokenizers_give_unasked_is_no_fault(made: Made) -> None:
    task, model = CausalLM(), made(LLAMA)
    task.prepare(model)
    batch = masked("token_type_ids")
    batch |= {"position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}
    assert int(task.weight({**batch, "lengths": torch.ones(4, dtype=torch.long), "text": ["a"] * 4})) == 14
    taken = names_taken(model)
    assert taken is not None
    assert taken >= {"input_ids", "cu_seq_lens_q", "seq_idx"}


def test_a_fraction_for_each_row_that_the_model_ignores_is_said_once(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    models = {CausalLM(): made(LLAMA), Classification(): made({**BERT, "num_labels": 50}, kind="TokenClassification")}
    for task, model in models.items():
        task.prepare(model)
        for _ in range(2):
            task.weight({**padded(DOCUMENTS[:4]), "sample_weight": torch.ones(4), "number": torch.arange(4)})
        (said,) = caplog.messages
        assert said.startswith(f"`sample_weight` of the batch has a fraction for each row, but {type(model).__name__} ")
        caplog.clear()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_adapters_hand_on_what_their_base_takes(made: Made) -> None:
    adapted = made(LLAMA, lora={"r": 2, "target_modules": ["q_proj"]})
    taken = names_taken(adapted)
    assert taken is not None
    assert "position_ids" in taken
    task = CausalLM()
    task.prepare(adapted)
    with pytest.raises(TaskError, match="`completion_mask` of the batch"):
        task.weight(masked("completion_mask"))


def test_a_model_that_says_nothing_of_what_it_takes_is_given_everything() -> None:
    class Anything(nn.Module):
        def forward(self, **named: Any) -> None: ...

    assert names_taken(Anything()) is None


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "position_ids"])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_column_of_tokens_that_packing_would_drop_is_refused_by_its_name(name: str, kind: Any) -> None:
    with pytest.raises(DataError, match=f"^`{name}` of sample 1 of the batch has a value for each token"):
        Packing()([[5, 6, 7], {"input_ids": [5, 6], name: kind([0, 1])}])
    other = {"input_ids": [5, 6], "token_type_ids": [0, 0], "text": "ab", "id": kind([1])}
    assert Packing()([other])["input_ids"].tolist() == [[5, 6]]
