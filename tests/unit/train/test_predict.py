"""Predictions: the same bits in the order of the data, whoever ran the model."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from evenstep import Ema, MapData, Mixture, Task, Trainer, Training
from evenstep.parallel import Ddp, Mesh, Single, Zero1
from evenstep.pipeline import PipelineModel
from evenstep.train import Prediction
from kit import Squares, filled, trainer_of


def ragged(count: int = 11) -> list[Any]:
    """Samples of 1 to 4 rows; without labels."""
    generator = torch.Generator().manual_seed(0)
    return [{"rows": torch.randn(n % 4 + 1, 3, generator=generator), "name": f"sample {n}"} for n in range(count)]


def padded(samples: list[Any]) -> Any:
    rows = nn.utils.rnn.pad_sequence([sample["rows"] for sample in samples], batch_first=True)
    return {"rows": rows, "names": [sample["name"] for sample in samples], "lengths": [len(s["rows"]) for s in samples]}


def data(count: int = 11, **more: Any) -> MapData:
    sizes = {"global_batch_size": 5, "micro_batch_size": 2, "shuffle": False}
    return MapData(ragged(count), collate=padded, **sizes | more)


class Name(Task):
    """Keeps a tree: rows cut to their lengths, a mask, names, and something that may be missing."""

    def inputs(self, batch: Any) -> Any:
        return batch["rows"]

    def weight(self, batch: Any) -> float:
        raise AssertionError("predictions have no weight")

    def loss(self, output: Any, batch: Any) -> Tensor:
        raise AssertionError("predictions have no loss")

    def predict(self, output: Tensor, batch: Any) -> Any:
        rows = [row[:length] for row, length in zip(output, batch["lengths"], strict=True)]
        extra = None if len(rows) == 1 else output.sum()
        return {"rows": rows, "mask": output > 0, "names": batch["names"], "extra": (extra, torch.empty(0))}


def layers() -> nn.Sequential:
    parts = [(nn.Linear(3, 3), nn.Dropout(0.5) if place % 2 else nn.Tanh()) for place in range(6)]
    return filled(nn.Sequential(*(one for part in parts for one in part)))


def trainer(model: nn.Module | None = None, strategy: Any = None, **more: Any) -> Trainer:
    return trainer_of(model or layers(), **{"task": Name(), "data": data(), "strategy": strategy, **more})


def check_same(mine: list[Prediction], other: list[Prediction]) -> None:
    assert [(list(one.samples), one.task) for one in mine] == [(list(one.samples), one.task) for one in other]
    for one, two in zip(mine, other, strict=True):
        (left, spec), (right, other_spec) = tree_flatten(one.output), tree_flatten(two.output)
        assert spec == other_spec
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b


@pytest.fixture(scope="module")
def alone() -> list[Prediction]:
    return trainer().predict(data())


def test_predictions_are_the_outputs_of_the_model_in_the_order_of_the_data(alone: list[Prediction]) -> None:
    model, some = layers().eval(), ragged()
    assert [list(one.samples) for one in alone] == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9], [10]]
    for one in alone:
        batch = padded([some[sample] for sample in one.samples])
        with torch.no_grad():
            wanted = Name().predict(model(batch["rows"]), batch)
        check_same([one], [Prediction(output=wanted, samples=one.samples)])


@pytest.mark.parametrize(
    ("ranks", "stages", "schedule", "kind"),
    [(3, 1, "", Ddp), (8, 1, "", Ddp), (2, 1, "", Zero1), (2, 2, "interleaved", Single), (6, 2, "zb_v", Ddp)],
)
def test_ranks_and_stages_give_the_predictions_of_one_process(
    on_ranks: Any, alone: list[Prediction], ranks: int, stages: int, schedule: str, kind: Any
) -> None:
    def act(group: Any) -> list[Prediction]:
        mesh = Mesh.of(group, pipeline=stages)
        model = PipelineModel(layers(), mesh=mesh, schedule=schedule) if stages > 1 else layers()
        return trainer(model, kind(mesh.data)).predict(data())

    first, *others = on_ranks(ranks, act)  # with 8 some ranks have no micro-batch
    check_same(first, alone)
    assert others == [[]] * (ranks - 1)


@dataclass
class Scores:
    rows: Tensor
    seen: Tensor


class Counting(nn.Linear):
    """Gives tensors that it goes on to write to, in a dataclass."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input: Tensor) -> Any:
        self.seen += len(input)
        return Scores(super().forward(input), self.seen)


def test_outputs_in_dataclasses_are_copies_as_those_in_dicts_are() -> None:
    rows = MapData(list(torch.randn(4, 3)), global_batch_size=2, shuffle=False)
    kept = [one.output for one in trainer(Counting(), data=rows, task=Squares()).predict(rows)]
    assert [float(one.seen) for one in kept] == [2.0, 4.0] and all(one.rows._base is None for one in kept)


class Fit(Name):
    def weight(self, batch: Any) -> float:
        return len(batch["names"])

    def loss(self, output: Any, batch: Any) -> Tensor:
        return (output**2).sum()


def test_the_average_predicts_and_training_goes_on_as_if_nothing_had_been(alone: list[Prediction]) -> None:
    straight, one = (trainer(task=Fit(), updates=3, train=Training(ema=Ema(decay=0.5))) for _ in range(2))
    straight.train()
    check_same(one.predict(data()), alone)
    generator = torch.get_rng_state()
    one.train()
    after = one.predict(data())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.training for module in one.model.modules())
    assert not torch.equal(after[0].output["rows"][0], alone[0].output["rows"][0])
    for a, b in zip(one.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(a, b)
    averaged = layers()
    averaged.load_state_dict(one.state_dict()["ema"])
    check_same(after, trainer(averaged).predict(data()))


def test_each_task_keeps_its_own() -> None:
    class Twice(Name):
        def predict(self, output: Tensor, batch: Any) -> Any:
            return output * 2, batch["names"]

    given = Mixture({"a": data(4), "b": data(3)}, end="max")
    found = trainer(task={"a": Name(), "b": Twice()}, data=given).predict(given)
    kinds = {(one.task, len(one.samples), type(one.output)) for one in found}
    assert kinds == {("a", 2, dict), ("b", 2, tuple), ("b", 1, tuple)}
