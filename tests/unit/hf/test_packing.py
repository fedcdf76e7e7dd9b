"""Documents in rows: which are where, that none sees another, and that samples stay samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import kit
from evenstep import MapData
from evenstep.errors import ArgumentError
from evenstep.integrations.hf import CausalLM, Packing
from evenstep.integrations.hf.packing import rows_of
from refused import refused

from .conftest import DOCUMENTS, LLAMA
from .test_language import nats_of, padded

Made = Callable[..., nn.Module]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(9, 20))
def test_each_document_is_in_one_row_that_has_room_for_it(lengths: list[int], room: int) -> None:
    rows = rows_of(lengths, room)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= room for row in rows)
    assert rows == rows_of(list(lengths), room)
    fullest = sorted(sum(lengths[number] for number in row) for row in rows)
    assert len(rows) == 1 or fullest[0] + fullest[1] > room  # no two rows would fit into one


@pytest.mark.parametrize(("family", "attention"), [("llama", "eager"), ("mistral", "sdpa")])
def test_a_packed_token_has_the_loss_that_it_has_in_its_document_alone(made: Made, attention: str, family: str) -> None:
    windowed = {"sliding_window": 3} if family == "mistral" else {}
    model = made({**LLAMA, "model_type": family, "attn_implementation": attention}, **windowed).eval()
    batch, task = Packing(max_tokens=16)(DOCUMENTS[:7]), CausalLM(packed=True)
    task.prepare(model)
    scores = model(**task.inputs(batch)).logits
    losses = functional.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
    packed = losses.view(len(scores), -1)
    rows = rows_of([len(one) for one in DOCUMENTS[:7]], 16)
    rounding = 1e-12 if attention == "sdpa" else 1e-6  # eager attention has its softmax in float32
    for row, numbers in enumerate(rows):
        begin = 0
        for number in numbers:
            alone = nats_of(model, DOCUMENTS[number])
            torch.testing.assert_close(packed[row, begin : begin + len(alone)], alone, rtol=0, atol=rounding)
            begin += len(DOCUMENTS[number])


def run(made: Made, collate: Callable[..., Any], *, micro: int | None = 4, **sizes: Any) -> Tensor:
    model = made(LLAMA)
    kit.trainer_of(
        model,
        task=CausalLM(packed=isinstance(collate, Packing)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        data=MapData(DOCUMENTS, micro_batch_size=micro, collate=collate, **(sizes or {"global_batch_size": 8})),
        updates=4,
    ).train()
    return kit.flat(model)


def test_packed_or_not_and_however_cut_a_run_has_the_same_parameters(made: Made) -> None:
    unpacked = run(made, padded)
    for collate in (Packing(), Packing(max_tokens=20), Packing(max_tokens=16, fixed=True)):
        torch.testing.assert_close(run(made, collate), unpacked, rtol=0, atol=1e-12)
    torch.testing.assert_close(run(made, Packing(), micro=3), unpacked, rtol=0, atol=1e-12)


def test_updates_of_so_many_packed_tokens_do_not_depend_on_the_rows(made: Made) -> None:
    budget: dict[str, Any] = {"global_batch_tokens": 40, "packed": True, "lengths": [len(one) for one in DOCUMENTS]}
    whole = run(made, padded, micro=None, **budget)
    rows = run(made, Packing(), micro=None, micro_batch_tokens=14, **budget)
    torch.testing.assert_close(rows, whole, rtol=0, atol=1e-12)


def test_weights_and_labels_go_along() -> None:
    samples = [{"input_ids": [1, 2], "labels": [1, -100], "weights": [0.5, 1.0]}, {"input_ids": [3], "weights": [2.0]}]
    batch = Packing(max_tokens=4, fixed=True, pad_token_id=9)(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9]]
    assert batch["labels"].tolist() == [[-100, -100, -100, -100]]
    assert batch["weights"].tolist() == [[0.5, 1.0, 2.0, 0.0]]


class Leaks(nn.Module):
    """Each token sees the sum of all before it, whatever the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> dict[str, Tensor]:
        seen = self.embedding(input_ids).cumsum(1)
        return {"logits": seen @ self.embedding.weight.T}


def test_a_model_that_does_not_keep_documents_apart_is_refused(made: Made) -> None:
    with refused(ArgumentError, "packed"):
        CausalLM(packed=True).prepare(Leaks())
    mamba = {"model_type": "mamba", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    with pytest.raises((ArgumentError, TypeError)):
        CausalLM(packed=True).prepare(made(mamba))
