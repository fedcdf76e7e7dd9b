"""Losses of language models and classifiers, beside those of each document by itself and those of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import kit
from evenstep import MapData, Task
from evenstep.errors import ArgumentError
from evenstep.integrations.hf import CausalLM, Classification, Packing, Seq2Seq
from evenstep.integrations.hf.packing import rows_of
from refused import refused

from .conftest import DOCUMENTS, LLAMA, T5, VOCABULARY

Made = Callable[..., nn.Module]


def padded(samples: list[list[int]], *, left: bool = False) -> dict[str, Tensor]:
    longest = max(map(len, samples))
    empty = [[0] * (longest - len(one)) for one in samples]
    rows = torch.tensor([rest + one if left else one + rest for one, rest in zip(samples, empty, strict=True)])
    return {"input_ids": rows, "attention_mask": (rows > 0).long(), "labels": rows.masked_fill(rows == 0, -100)}


def nats_of(model: nn.Module, document: list[int]) -> Tensor:
    """−log p of each token after the first, by the document alone."""
    tokens = torch.tensor(document)
    scores = model(input_ids=tokens[None]).logits[0].detach().double().log_softmax(-1)
    return -scores[:-1].gather(1, tokens[1:, None]).squeeze(1)


def summed(model: nn.Module, task: Task, batch: Any) -> float:
    """The task's summed loss, as the engine asks for it."""
    task.prepare(model)
    return float(task.loss(model(**task.inputs(batch)), batch).sum.detach())  # pyright: ignore


@pytest.mark.parametrize(("left", "chunked"), [(False, True), (True, False)])
def test_the_loss_is_the_sum_over_the_tokens_of_each_document(
    made: Made, transformers: Any, left: bool, chunked: bool
) -> None:
    model, task = made(LLAMA), CausalLM(chunked=chunked)
    batch = transformers.BatchEncoding(padded(DOCUMENTS[:5], left=left))
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    wanted = sum(float(nats_of(model, document).sum()) for document in DOCUMENTS[:5])
    assert summed(model, task, {**batch, "position_ids": positions}) == pytest.approx(wanted, rel=1e-12)
    assert int(task.weight(batch)) == sum(len(document) - 1 for document in DOCUMENTS[:5])


@pytest.mark.parametrize("chunked", [False, True])
def test_weights_are_those_of_the_labels_beside_them(made: Made, chunked: bool) -> None:
    model, document = made(LLAMA), DOCUMENTS[4]
    weights = torch.arange(len(document)).double() / 3
    batch = {**padded([document]), "weights": weights[None]}
    wanted = float((nats_of(model, document) * weights[1:]).sum())
    task = CausalLM(chunked=chunked)
    assert summed(model, task, batch) == pytest.approx(wanted, rel=1e-12)
    assert float(task.weight(batch)) == pytest.approx(float(weights[1:].sum()))


def test_label_smoothing_spreads_a_part_of_the_target_evenly(made: Made) -> None:
    model, document = made(LLAMA), DOCUMENTS[4]
    scores = model(input_ids=torch.tensor([document])).logits[0, :-1].detach().log_softmax(-1)
    wanted = 0.9 * nats_of(model, document).sum() - 0.1 * scores.mean(-1).sum()
    assert summed(model, CausalLM(label_smoothing=0.1), padded([document])) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_encoder_decoder_learns_the_labels_where_they_stand(made: Made, chunked: bool) -> None:
    model, batch, task = made(T5, kind="Seq2SeqLM"), padded(DOCUMENTS[:5]), Seq2Seq(chunked=chunked)
    batch["labels"] = padded([document[::-1] for document in DOCUMENTS[1:6]])["labels"]
    counted = int((batch["labels"] >= 0).sum())
    assert summed(model, task, batch) == pytest.approx(float(model(**batch).loss.detach()) * counted, rel=1e-6)
    assert int(task.weight(batch)) == counted
    given = {**batch, "decoder_input_ids": torch.ones_like(batch["labels"])}
    scores = model(**{name: one for name, one in given.items() if name != "labels"}).logits.detach()
    wanted = functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    assert summed(model, task, given) == pytest.approx(float(wanted), rel=1e-12)


def test_the_scores_of_all_tokens_are_never_in_memory(made: Made) -> None:
    model, task = made(LLAMA), CausalLM(chunked=True)
    task.prepare(model)
    output = model(**task.inputs(padded(DOCUMENTS[:5])))
    assert output.logits.ndim == 0
    assert model(input_ids=torch.tensor([DOCUMENTS[0]])).logits.shape == (1, 3, 50)  # nobody asks for a loss here


BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
}


@pytest.mark.parametrize("kind", ["bart", "mbart"])
def test_the_decoder_gets_the_labels_as_its_own_model_shifts_them(made: Made, kind: str) -> None:
    """MBart begins a row with the label that is its last, not with `decoder_start_token_id`."""
    model, task = made(BART, kind="Seq2SeqLM", model_type=kind), Seq2Seq()
    batch = {"input_ids": torch.tensor([[5, 6, 7]] * 2), "labels": torch.tensor([[8, 9, 3], [8, 4, -100]])}
    wanted = float(model(**batch).loss.detach()) * 5
    assert summed(model, task, batch) == pytest.approx(wanted, rel=1e-6)  # which it computes in float32


def test_a_model_that_sees_the_tokens_that_it_is_to_tell_is_refused(made: Made) -> None:
    bert = {**LLAMA, "model_type": "bert"}
    CausalLM().prepare(made(bert, is_decoder=True))
    with refused(ArgumentError, "model"):
        CausalLM().prepare(made(bert))


BERT = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MANY = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("problem", "kind", "labels", "units"),
    [
        ("single_label", "SequenceClassification", torch.tensor([2, 0, 1, 1]), 4),
        ("single_label", "SequenceClassification", torch.tensor([2, -100, 1, 1]), 3),
        ("multi_label", "SequenceClassification", MANY, 12),
        ("regression", "SequenceClassification", MANY, 12),
        ("single_label", "TokenClassification", padded(DOCUMENTS[:4])["labels"].clamp(max=2), 18),
    ],
)
def test_the_loss_is_that_of_transformers_times_the_number_of_labels(
    made: Made, problem: Any, kind: str, labels: Tensor, units: int
) -> None:
    said = {"multi_label": "multi_label_classification", "regression": "regression"}
    model = made({**BERT, "num_labels": 3, "problem_type": said.get(problem)}, kind=kind)
    batch = {**padded(DOCUMENTS[:4]), "labels": labels}
    task = Classification(problem=problem)
    asked = {**batch, "labels": labels.double() if labels.is_floating_point() else labels}
    assert summed(model, task, batch) == pytest.approx(float(model(**asked).loss.detach()) * units, rel=1e-12)
    assert int(task.weight(batch)) == units


@pytest.mark.parametrize(
    ("problem", "labels"),
    [("single_label", torch.tensor([2, -100, 1, 1])), ("multi_label", MANY), ("regression", MANY)],
)
def test_weights_count_a_label_more_or_less(made: Made, problem: Any, labels: Tensor) -> None:
    model, task = made({**BERT, "num_labels": 3}, kind="SequenceClassification"), Classification(problem=problem)
    batch = {**padded(DOCUMENTS[:4]), "labels": labels}
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    weights = weights if labels.ndim == 1 else weights[:, None].expand_as(labels)
    wanted = 0.0
    for row in range(4):
        alone = {**padded(DOCUMENTS[row : row + 1]), "labels": labels[row : row + 1]}
        wanted += row * summed(model, task, alone)
    assert summed(model, task, {**batch, "weights": weights}) == pytest.approx(wanted, rel=1e-12)
    assert float(task.weight({**batch, "weights": weights})) == (5 if labels.ndim == 1 else 18)
    assert "weights" not in task.inputs({**batch, "weights": weights})


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
