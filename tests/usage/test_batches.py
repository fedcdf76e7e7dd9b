"""Every kind of batch with every kind of loss, in every cut: the gradient of one batch in float64, or the question."""

from typing import Any

import batches
import pytest
import torch
from batches import BATCHES, GOOD_LOSSES, MICRO, REFUSED_LOSSES, Kind
from batches_programs import reference, trained, trainer_of

import evenstep
from evenstep.data.split import halves, num_samples
from evenstep.errors import EvenstepError, OutOfMemoryError

WORKING = [kind for kind in BATCHES if kind.works]
TUPLE = BATCHES[0]
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")


def named(kind: Kind) -> str:
    return kind.name


@pytest.mark.parametrize("kind", WORKING, ids=named)
def test_a_batch_of_every_kind_has_the_right_weight_and_halves(kind: Kind) -> None:
    batch = kind.collate(batches.samples_of(7))
    assert num_samples(batch, 7) == 7
    parts = halves(batch, 7)
    if not kind.cut:
        assert len(parts) == 1
        return
    x, y = kind.read(batch)
    read = [kind.read(part) for part in parts]
    assert [len(theirs) for theirs, _ in read] == [4, 3]
    assert torch.allclose(torch.cat([theirs for theirs, _ in read]), x, rtol=1e-14)
    assert torch.equal(torch.cat([theirs for _, theirs in read]), y)


@pytest.mark.parametrize("kind", WORKING, ids=named)
@pytest.mark.parametrize(("micro", "loss"), [(None, "sum"), (5, "sum"), (MICRO, "late weight"), (1, "Loss.of_mean")])
def test_every_kind_of_batch_trains_as_one_batch_of_plain_pytorch(kind: Kind, micro: int | None, loss: str) -> None:
    samples = batches.samples_of()
    assert torch.allclose(trained(kind, samples, micro=micro, loss=loss), reference(kind, samples), rtol=1e-12)


@pytest.mark.parametrize("loss", GOOD_LOSSES)
def test_every_good_loss_trains_as_one_batch_of_plain_pytorch(loss: str) -> None:
    samples = batches.samples_of()
    assert torch.allclose(trained(TUPLE, samples, micro=MICRO, loss=loss), reference(TUPLE, samples), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKING, ids=named)
@pytest.mark.parametrize("loss", GOOD_LOSSES)
@pytest.mark.parametrize("micro", [None, 7, MICRO, 1])
def test_every_batch_with_every_good_loss_in_every_cut(kind: Kind, loss: str, micro: int | None) -> None:
    samples = batches.samples_of()
    wanted = reference(kind, samples)
    assert torch.allclose(trained(kind, samples, micro=micro, loss=loss), wanted, rtol=1e-12)
    if kind.cut and micro is None:
        assert torch.allclose(trained(kind, samples, loss=loss, room=2), wanted, rtol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in WORKING if kind.cut], ids=named)
@pytest.mark.parametrize("room", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_batch_that_does_not_fit_is_cut_and_the_gradient_is_the_same(kind: Kind, room: int) -> None:
    samples = batches.samples_of()
    assert torch.allclose(trained(kind, samples, room=room), reference(kind, samples), rtol=1e-12)


@pytest.mark.parametrize("loss", REFUSED_LOSSES)
@pytest.mark.parametrize("kind", [TUPLE, BATCHES[2]], ids=named)
def test_a_loss_that_is_no_sum_is_refused(loss: str, kind: Kind) -> None:
    trainer = trainer_of(kind, batches.samples_of(), loss=loss, micro=MICRO)
    with pytest.raises(EvenstepError):
        trainer.train()
    assert trainer.progress.update == 0


def test_a_features_first_batch_as_wide_as_long_is_not_cut_along_its_features() -> None:
    kind = next(kind for kind in BATCHES if kind.name == "features first")
    samples = batches.samples_of()
    assert batches.FEATURES == 5
    with pytest.raises(OutOfMemoryError):
        trained(kind, samples[:10], micro=5, room=4)


def test_a_mapping_of_transformers_is_keyword_arguments_of_the_model() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(batches.FEATURES, batches.CLASSES).double()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.linear(x), y)}

    class Model(evenstep.Task):
        def loss(self, output: Any, batch: Any) -> Any:
            return evenstep.Loss.of_mean(output["loss"], len(batch["y"]))

    kind = next(kind for kind in BATCHES if kind.name == "mapping")
    model = Words()
    data = evenstep.MapData(batches.samples_of(), global_batch_size=8, micro_batch_size=4, collate=kind.collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = evenstep.Trainer(model=model, task=Model(), optimizer=optimizer, data=data, updates=2, device="cpu")
    assert trainer.train().update == 2
