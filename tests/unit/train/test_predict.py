"""Predictions: the same bits in the order of the data, whoever ran the model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import EvenstepError
from evenstep.parallel import Ddp, Mesh, Single, Zero1
from evenstep.pipeline import PipelineModel
from evenstep.train import Prediction

OnRanks = Callable[..., list[Any]]


class Ragged(torch.utils.data.Dataset[Any]):
    """Samples of 1 to 4 rows; without labels."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [torch.randn(n % 4 + 1, 3, generator=generator) for n in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"rows": self.rows[index], "name": f"sample {index}"}


def padded(samples: list[Any]) -> Any:
    rows = torch.nn.utils.rnn.pad_sequence([sample["rows"] for sample in samples], batch_first=True)
    return {"rows": rows, "names": [sample["name"] for sample in samples], "lengths": [len(s["rows"]) for s in samples]}


def data(count: int = 11, *, shuffle: bool = False) -> MapData:
    return MapData(Ragged(count), global_batch_size=5, micro_batch_size=2, shuffle=shuffle, collate=padded)


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


def layers(depth: int = 6) -> nn.Sequential:
    parts: list[nn.Module] = []
    for place in range(depth):
        linear = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        parts += [linear, nn.Dropout(0.5) if place % 2 else nn.Tanh()]
    return nn.Sequential(*parts)


def trainer(model: nn.Module, strategy: Any = None, **more: Any) -> Trainer:
    given: dict[str, Any] = {
        "task": Name(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "data": data(),
        "updates": 1,
        "device": "cpu",
        "strategy": strategy,
    }
    return Trainer(model=model, **(given | more))


def check_same(mine: list[Prediction], other: list[Prediction]) -> None:
    assert len(mine) == len(other)
    for one, two in zip(mine, other, strict=True):
        assert (list(one.samples), one.task) == (list(two.samples), two.task)
        assert one.output["names"] == two.output["names"]
        left, spec = torch.utils._pytree.tree_flatten(one.output)
        right, other_spec = torch.utils._pytree.tree_flatten(two.output)
        assert spec == other_spec
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b


@pytest.fixture(scope="module")
def alone() -> list[Prediction]:
    return trainer(layers()).predict(data())


def test_predictions_are_what_the_model_gives_in_the_order_of_the_data(alone: list[Prediction]) -> None:
    model, dataset = layers().eval(), Ragged(11)
    assert [list(one.samples) for one in alone] == [[0, 1], [2, 3], [4], [5, 6], [7, 8], [9], [10]]
    for one in alone:
        batch = padded([dataset[sample] for sample in one.samples])
        with torch.no_grad():
            wanted = Name().predict(model(batch["rows"]), batch)
        check_same([one], [Prediction(output=wanted, samples=one.samples)])


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, partial(Ddp, reduction="fast")), (3, Ddp), (8, partial(Ddp, reduction="fast")), (2, "zero1")],
)
def test_replicas_give_what_one_process_does(on_ranks: OnRanks, alone: list[Prediction], ranks: int, kind: Any) -> None:
    def act(group: Any) -> list[Prediction]:
        strategy = Zero1(group, reduction="fast") if kind == "zero1" else kind(group)
        return trainer(layers(), strategy).predict(data())

    first, *others = on_ranks(ranks, act)  # with 8 some ranks have no micro-batch
    check_same(first, alone)
    assert others == [[]] * (ranks - 1)


@pytest.mark.parametrize(
    ("ranks", "pipeline", "schedule"), [(2, 2, "1f1b"), (3, 3, "zb_v"), (2, 2, "interleaved"), (6, 2, "zb_v")]
)
def test_stages_give_what_one_process_does(
    on_ranks: OnRanks, alone: list[Prediction], ranks: int, pipeline: int, schedule: str
) -> None:
    def act(group: Any) -> list[Prediction]:
        mesh = Mesh.of(group, pipeline=pipeline)
        model = PipelineModel(layers(), mesh=mesh, schedule=schedule)
        return trainer(model, Single(mesh.data) if ranks == pipeline else Ddp(mesh.data, reduction="fast")).predict(
            data()
        )

    first, *others = on_ranks(ranks, act)
    check_same(first, alone)
    assert others == [[]] * (ranks - 1)


def test_the_ranks_that_ask_get_them(on_ranks: OnRanks, alone: list[Prediction]) -> None:
    def act(group: Any) -> list[Prediction]:
        mesh = Mesh.of(group, pipeline=2)
        model = PipelineModel(layers(), mesh=mesh)
        return trainer(model, Ddp(mesh.data, reduction="fast")).predict(data(), collect=group.rank in (1, 2))

    found = on_ranks(4, act)
    assert [len(one) for one in found] == [0, 7, 7, 0]
    check_same(found[1], alone)
    check_same(found[2], alone)


class Rows(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return output.square().sum()


@dataclass
class Scores:
    rows: Tensor
    seen: Tensor


class Counting(nn.Linear):
    """Gives what it goes on to write to, in a dataclass."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input: Tensor) -> Any:
        self.seen += len(input)
        return Scores(super().forward(input), self.seen)


def test_outputs_in_dataclasses_are_copies_as_those_in_dicts_are() -> None:
    rows = MapData(list(torch.randn(4, 3)), global_batch_size=2, shuffle=False)
    kept = [one.output for one in trainer(Counting(), data=rows, task=Rows()).predict(rows)]
    assert [float(one.seen) for one in kept] == [2.0, 4.0] and all(one.rows._base is None for one in kept)


def test_the_average_is_what_predicts_and_training_goes_on_as_if_nothing_had_been(alone: list[Prediction]) -> None:
    class Fit(Name):
        def weight(self, batch: Any) -> float:
            return len(batch["names"])

        def loss(self, output: Any, batch: Any) -> Tensor:
            return (output**2).sum()

    def made() -> Trainer:
        return trainer(layers(), task=Fit(), updates=3, train=Training(ema=Ema(decay=0.5)), folder=None)

    straight, one = made(), made()
    straight.train()
    check_same(one.predict(data()), alone)
    generator = torch.get_rng_state()
    one.train()
    after = one.predict(data())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.training for module in one.model.modules())
    assert not torch.equal(after[0].output["mask"], alone[0].output["mask"]) or not torch.equal(
        after[0].output["rows"][0], alone[0].output["rows"][0]
    )
    for a, b in zip(one.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(a, b)
    weights = one.state_dict()["ema"]
    averaged = layers()
    averaged.load_state_dict({name: weights[name] for name in averaged.state_dict()})
    check_same(after, trainer(averaged).predict(data()))
    assert not one.storage.latest("predict/loss")


def test_each_task_keeps_its_own() -> None:
    class Twice(Name):
        def predict(self, output: Tensor, batch: Any) -> Any:
            return output * 2, batch["names"]

    tasks: dict[str, Task] = {"a": Name(), "b": Twice()}
    given = Mixture({"a": data(4), "b": data(3)}, end="max")
    found = trainer(layers(), task=tasks, data=given).predict(given)
    kinds = [(one.task, len(one.samples), type(one.output)) for one in found]
    assert set(kinds) == {("a", 2, dict), ("b", 2, tuple), ("b", 1, tuple)}


def test_an_error_of_one_rank_is_told_to_the_others(on_ranks: OnRanks) -> None:
    class Fails(Name):
        def predict(self, output: Tensor, batch: Any) -> Any:
            if "sample 7" in batch["names"]:
                raise ValueError("no such thing")
            return output

    def act(group: Any) -> list[str]:
        with pytest.raises((ValueError, EvenstepError)) as raised:
            mesh = Mesh.of(group, pipeline=2)
            trainer(PipelineModel(layers(), mesh=mesh), Single(mesh.data), task=Fails()).predict(data(), collect=False)
            raise EvenstepError("done")
        until = monotonic() + 20
        while not (reason := group.failure()) and monotonic() < until:  # word comes by another thread
            sleep(0.01)
        return [str(raised.value), reason]

    said = on_ranks(2, act)
    assert said[1][0] == "no such thing"
    assert "pipeline rank 1 of 2 stopped at action 1F1" in said[0][1]


def test_what_waits_does_not_grow_with_the_number_of_micro_batches() -> None:
    alive = peak = 0

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal alive, peak
            y = x.clone()
            alive += 1
            peak = max(peak, alive)

            def gone() -> None:
                nonlocal alive
                alive -= 1

            finalize(y, gone)
            return y

    class First(Name):
        def predict(self, output: Tensor, batch: Any) -> Any:
            return output[0, 0]

    def most(count: int, build: Callable[[], nn.Module]) -> int:
        nonlocal peak
        peak = 0
        given = MapData(Ragged(count), global_batch_size=count, micro_batch_size=1, shuffle=False, collate=padded)
        found = trainer(build(), task=First()).predict(given)
        assert len(found) == count
        assert sum(one.output.untyped_storage().nbytes() for one in found) == 12 * count  # no view of what is large
        return peak

    def whole() -> nn.Module:
        return nn.Sequential(layers(), Watched())

    def staged() -> nn.Module:
        return PipelineModel(nn.Sequential(layers(), Watched()), stages_per_rank=3)

    assert [most(24, whole), most(4, whole)] == [1, 1]
    assert most(24, staged) == most(4, staged)
