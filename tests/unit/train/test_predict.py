"""Predictions and evaluations by a task itself: the same bits in the order of the data, whoever ran the model."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from evenstep import Ema, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import TaskError
from evenstep.parallel import Ddp, Mesh, Single, Zero1
from evenstep.pipeline import PipelineModel
from evenstep.train import Prediction
from kit import Squares, engine_of, filled, line, net, points, stacked, trainer_of
from kit import data as data_of
from kit import trainer_of as trainer_of_kit


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


def counts_of(model: Any, x: Tensor) -> dict[str, int]:
    """Of how many samples the output rises, where the inputs are doubled; and of how many in all."""
    with torch.no_grad():
        return {"rise": int((model(2 * x) > model(x)).sum()), "all": len(x)}


class Rises(Squares):
    """Trains on squares; evaluates counts."""

    derived: Any = {  # noqa: RUF012
        "rate": lambda counts: counts["rise"] / counts["all"],
        "ppl": lambda metrics: math.exp(metrics["loss"]),
    }

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        assert not model.training and not torch.is_grad_enabled() and not self.now.is_training
        return Loss(None, metrics={"calls": (2, 1)}, counts=counts_of(model, batch[0]))


class Beside(Rises):
    """The same, and the loss."""

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        loss: Any = Task.evaluate(self, model, batch)
        return replace(super().evaluate(model, batch), sum=loss)


def counting(task: Any = None, model: nn.Module | None = None, **more: Any) -> Trainer:
    given = {"evaluations": data_of(11, size=4, micro=4), "task": task or Rises()}
    return trainer_of_kit(model, **given | more)


def by_hand(model: Any) -> dict[str, float]:
    counts = counts_of(model, stacked(points(11))[0])
    return {"rate": counts["rise"] / counts["all"], "calls": 2.0}


def test_counts_are_of_all_samples_at_once_and_no_loss_is_made_up() -> None:
    trainer = counting()
    found = trainer.train().metrics
    assert {name: found[f"valid/{name}"] for name in ("rate", "calls")} == by_hand(trainer.model)
    assert 0 < found["valid/rate"] < 1
    assert not {"valid/loss", "valid/no_loss", "valid/ppl", "valid/rise"} & found.keys()
    assert found["train/ppl"] == math.exp(found["train/loss"])


@pytest.mark.parametrize(("ranks", "size", "micro"), [(1, 4, 1), (2, 11, 11), (3, 5, 2)])
def test_every_cut_on_any_ranks_gives_the_same_bits(on_ranks: Any, ranks: int, size: int, micro: int) -> None:
    def act(group: Any) -> Any:
        return counting(strategy=Ddp(group), evaluations=data_of(11, size=size, micro=micro)).evaluate()["valid"]

    assert on_ranks(ranks, act) == [by_hand(net())] * ranks


def test_the_loss_is_also_reported_if_the_task_computes_it() -> None:
    trainer = counting(Beside())
    found = trainer.train().metrics
    x, y = stacked(points(11))
    with torch.no_grad():
        loss = ((trainer.model(x).squeeze(-1) - y) ** 2).mean().item()
    assert found["valid/loss"] == pytest.approx(loss, rel=1e-12)
    assert found["valid/ppl"] == math.exp(found["valid/loss"])
    assert found["valid/rate"] == by_hand(trainer.model)["rate"]


@pytest.mark.parametrize("evaluated", ["average", "parameters"])
def test_it_is_evaluated_with_the_average_or_the_parameters(evaluated: Any) -> None:
    trainer, averaged = counting(train=Training(ema=Ema(decay=0.9, evaluated=evaluated))), net()
    found = trainer.train().metrics
    averaged.load_state_dict(trainer.state_dict()["ema"])
    assert found["valid/rate"] == by_hand(averaged if evaluated == "average" else trainer.model)["rate"]


def test_batches_that_do_not_fit_into_memory_are_evaluated_in_parts() -> None:
    class Small(Rises):
        def evaluate(self, model: nn.Module, batch: Any) -> Loss:
            if len(batch[0]) > 1:
                raise MemoryError("injected")
            return super().evaluate(model, batch)

    assert counting(Small()).evaluate()["valid"] == by_hand(net())


def test_in_16_bits_the_model_is_called_in_its_own_format() -> None:
    class Called(Squares):
        def evaluate(self, model: nn.Module, batch: Any) -> Loss:
            output = model(batch[0])
            assert output.dtype == torch.float32 and next(model.parameters()).dtype == torch.bfloat16
            return Loss(((output.squeeze(-1) - batch[1]) ** 2).sum(), metrics={"seen": (len(output), 1)})

    batch = torch.ones(2, 3), torch.zeros(2)
    mine, plain = (
        engine_of(line(torch.float32), task, precision="bf16-true").evaluate(batch) for task in (Called(), Squares())
    )
    assert mine == plain | {"seen": 2}


def test_batches_without_labels_are_evaluated_and_losses_of_others_are_still_checked() -> None:
    class Unlabelled(Rises):
        def evaluate(self, model: Any, batch: Any) -> Loss:
            return Loss(None, counts=counts_of(model, batch["x"]))

    firsts = [{"x": x} for x, _ in points(11)]
    trainer = counting(Unlabelled(), evaluations=MapData(firsts, global_batch_size=2, shuffle=False))
    assert trainer.evaluate()["valid"] == {"rate": by_hand(net())["rate"]}
    with pytest.raises(TaskError):
        counting(type("Mean", (Rises,), {"loss": lambda self, out, batch: out.mean()})()).train()


def test_each_of_several_tasks_evaluates_in_its_own_way() -> None:
    plain, model = type("Plain", (Rises,), {"evaluate": Task.evaluate, "derived": {}})(), net()
    sets, valid = (Mixture({name: data_of(count, size=4) for name in "ab"}, end="max") for count in (8, 11))
    metrics = counting({"a": Rises(), "b": plain}, model, data=sets, evaluations=valid).train().metrics
    assert metrics["valid/a/rate"] == by_hand(model)["rate"]
    assert "valid/a/loss" not in metrics and "valid/b/loss" in metrics and "valid/b/rate" not in metrics
