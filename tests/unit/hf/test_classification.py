"""Classes of texts and tokens, several labels, and numbers, beside transformers' own losses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kit
from evenstep import MapData, Memory, Training
from evenstep.integrations.hf import Classification

from .conftest import DOCUMENTS, LLAMA
from .test_language import padded, summed

Made = Callable[..., nn.Module]
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


def test_a_decoder_is_computed_again_in_the_backward_with_the_same_bits(made: Made) -> None:
    """It keeps keys and values unless it is told not to, and would find them there the second time."""
    decoder = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "num_labels": 3, "pad_token_id": 0}

    def collate(some: list[Any]) -> dict[str, Tensor]:
        return {**padded(some), "labels": torch.tensor([len(one) % 3 for one in some])}

    def run(checkpoint: str) -> Tensor:
        model = made(decoder, kind="SequenceClassification")
        data = MapData(DOCUMENTS, global_batch_size=8, collate=collate)
        train = Training(memory=Memory(checkpoint=checkpoint))
        kit.trainer_of(model, task=Classification(), data=data, updates=2, train=train).train()
        return kit.flat(model)

    assert torch.equal(run("blocks"), run("none"))
