"""Metrics of tasks and hooks: objects of torchmetrics, pairs, derived metrics, and values as they were given."""

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, MulticlassF1Score

from evenstep import Failures, Hook, Logging, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import ArgumentError, TaskError
from evenstep.events import Best, Evaluate, Storage
from evenstep.events.metrics.meters import Meters
from evenstep.parallel import Ddp, Group, Single
from evenstep.precision import Fp16Mixed
from evenstep.train import FailurePolicy
from kit import Regress, Squares, data, engine_of, heads, history, line, points, samples, stacked, trainer_of
from refused import refused

pytestmark = pytest.mark.filterwarnings("ignore:No .* samples in targets")  # torchmetrics, of short windows
SIZES = {"a": 6, "b": 5}


def metrics_of() -> dict[str, Any]:
    metrics = {
        "auroc": BinaryAUROC(),  # lists of all that was seen
        "error": torchmetrics.MeanSquaredError(),  # sums
        "pearson": torchmetrics.PearsonCorrCoef(),  # values that are not reduced, but stacked
        "largest": torchmetrics.MaxMetric(),
    }
    return {name: metric.set_dtype(torch.float64) for name, metric in metrics.items()}


def seen(output: Tensor, batch: Any) -> dict[str, Any]:
    return {
        "auroc": {"preds": output.sigmoid(), "target": (batch[1] > 0).long()},
        "largest": {"value": output.float()},
        "preds": output,
        "target": batch[1],
    }


class Measured(Regress):
    """A regression whose output is also observed by metrics."""

    def __init__(self, head: str, metrics: Any = None) -> None:
        super().__init__(head)
        self.metrics = metrics_of() if metrics is None else metrics

    def weight(self, batch: Any) -> Any:
        return len(batch[0])

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(super().loss(output, batch).sum, observed=seen(output, batch))


def mixture(count: int = 30, *, micro: int = 2, **more: Any) -> Mixture:
    sets = {
        name: MapData(samples(count, seed), global_batch_size=size, micro_batch_size=min(micro, size), shuffle=False)
        for seed, (name, size) in enumerate(SIZES.items())
    }
    return Mixture(sets, **more)


def measuring(task: Any = None, **more: Any) -> Trainer:
    model = heads(*SIZES)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    given = {"updates": 4, "log": Logging(every_updates=2), "data": mixture(), "optimizer": sgd}
    return trainer_of(model, task=task or {name: Measured(name) for name in SIZES}, **given | more)


def by_hand(batches: list[tuple[Tensor, Any]]) -> dict[str, float]:
    """Each metric over all batches, in one process without the engine."""
    found: dict[str, float] = {}
    for name, metric in metrics_of().items():
        for output, batch in batches:
            given = seen(output, batch)
            metric.update(**given.get(name, {key: given[key] for key in ("preds", "target")}))
        found[name] = float(metric.compute())
    return found


@pytest.mark.parametrize(("ranks", "micro", "count"), [(1, 1, 13), (2, 4, 13), (4, 4, 3)])
def test_an_evaluation_is_of_all_samples_at_once_for_any_cut_and_ranks(
    on_ranks: Any, ranks: int, micro: int, count: int
) -> None:
    def act(group: Group) -> dict[str, float]:
        strategy = Single() if ranks == 1 else Ddp(group)
        return measuring(strategy=strategy, evaluations={"valid": mixture(count, micro=micro, end="max")}).evaluate()[
            "valid"
        ]

    results = on_ranks(ranks, act)
    assert all(got == results[0] for got in results)  # also on ranks that have seen nothing
    for seed, name in enumerate(SIZES):
        batch = stacked(samples(count, seed))
        with torch.no_grad():
            wanted = by_hand([(heads(*SIZES)(batch[0], name), batch)])
        for key, value in wanted.items():
            assert results[0][f"{name}/{key}"] == pytest.approx(value, rel=1e-9, nan_ok=True), key


def test_a_skipped_update_is_not_observed() -> None:
    spoilt = samples(30, 0)[8][1]  # in update 2

    class Bad(Measured):
        def loss(self, output: Any, batch: Any) -> Loss:
            factor = float("nan") if batch[1][0] == spoilt else 1.0
            return Loss(output.sum() * factor, observed={"value": torch.ones(len(batch[0]))})

    task = {"a": Bad("a", {"count": torchmetrics.SumMetric()}), "b": Measured("b", {})}
    trainer = measuring(task, failures=Failures(non_finite="skip"), updates=3)
    trainer.train()
    assert sum(history(trainer, "train/a/count")) == 18.0


def test_a_batch_that_is_cut_is_observed_once() -> None:
    class Small(Measured):
        failed = 0

        def loss(self, output: Any, batch: Any) -> Loss:
            if len(batch[0]) > 2:
                Small.failed += 1
                raise MemoryError
            return super().loss(output, batch)

    valid = mixture(13, micro=6, end="max")
    got = measuring({n: Small(n) for n in SIZES}, evaluations={"valid": valid}).evaluate()["valid"]
    assert Small.failed
    assert got == pytest.approx(measuring(evaluations={"valid": valid}).evaluate()["valid"], rel=1e-9)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_collection_of_metrics_is_taken(is_whole: bool) -> None:
    collection = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
    metrics = collection if is_whole else {"of": collection}
    names = set(measuring({name: Measured(name, metrics) for name in SIZES}, updates=2).train().metrics)
    prefix = "train/a/" if is_whole else "train/a/of_"
    assert {f"{prefix}MeanSquaredError", f"{prefix}MeanAbsoluteError"} <= names


def test_numbers_by_class_are_named_and_a_tensor_is_refused() -> None:
    def settled(metric: Any) -> list[str]:
        storage = Storage(meters=Meters({"f1": metric}))
        storage.observe("train/", "f1", {"preds": torch.tensor([0, 1]), "target": torch.tensor([0, 0])}, update=1)
        return [record.name for record in storage.settle()]

    classwise = torchmetrics.ClasswiseWrapper(MulticlassF1Score(2, average=None))
    assert settled(classwise) == ["train/f1/multiclassf1score_0", "train/f1/multiclassf1score_1"]
    with pytest.raises(ArgumentError):
        settled(BinaryConfusionMatrix())


@pytest.mark.parametrize("metrics", [{"f1": 3}, {"loss": torchmetrics.SumMetric()}])
def test_other_objects_and_taken_names_are_refused(metrics: Any) -> None:
    with refused(ArgumentError, "metrics"):
        measuring({n: Measured(n, metrics) for n in SIZES})


class Puts(Hook):
    """Puts a value at each event of an update."""

    def __init__(self) -> None:
        self.num_begun = 0

    def before_update(self, event: Any) -> None:
        self.num_begun += 1
        self.trainer.storage.put("mine/before_update", 1.0, 2, update=event.update)


def puts(name: str) -> Callable[[Puts, Any], None]:
    return lambda hook, event: hook.trainer.storage.put(f"mine/{name}", 1.0, 2, update=event.update)


for moment in ("before_microbatch", "before_step", "after_update"):
    setattr(Puts, moment, puts(moment))


class Bad(Squares):
    """At some batches there is no memory for more than one sample, or the loss is NaN `bad_tries` times."""

    def __init__(self, *, no_memory: bool = False, bad: int = -1, bad_tries: int = 0) -> None:
        self.no_memory, self.bad, self.bad_tries = no_memory, bad, bad_tries

    def loss(self, output: Tensor, batch: Any) -> Any:
        total = super().loss(output.float(), batch)
        if self.no_memory and len(output) > 1:
            raise torch.OutOfMemoryError("no memory for this")
        if self.bad_tries and self.bad in batch[2].tolist():
            self.bad_tries -= 1
            return total * float("nan")
        return total


def numbered(micro: int = 2) -> MapData:
    some = [(x, y, torch.tensor(n)) for n, (x, y) in enumerate(points(16, dtype=torch.float32))]
    return MapData(some, global_batch_size=4, micro_batch_size=micro, shuffle=False)


def putting(task: Any, hook: Hook, *, micro: int = 2, **more: Any) -> Trainer:
    if "epochs" not in more:
        more["updates"] = 4
    return trainer_of(line(torch.float32), hook, task=task, data=numbered(micro), **more)


def weights_of(trainer: Trainer, name: str) -> dict[int, float]:
    return {record.update: record.weight for record in trainer.storage.history(f"mine/{name}")}


TRIED: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "at once": lambda: ({}, {}),
    "no memory": lambda: ({"no_memory": True}, {}),
    "overflow": lambda: ({}, {"precision": Fp16Mixed(initial=2.0**40)}),
    "retried": lambda: ({"bad": 9, "bad_tries": 1}, {"failures": Failures(non_finite=FailurePolicy("retry", limit=3))}),
    "skipped": lambda: ({"bad": 9, "bad_tries": 9}, {"failures": Failures(non_finite="skip"), "epochs": 1}),
}


@pytest.mark.parametrize("tried", TRIED)
def test_values_of_hooks_are_recorded_once_per_update(tried: str) -> None:
    of_task, more = TRIED[tried]()
    hook = Puts()
    trainer = putting(Bad(**of_task), hook, **more)
    trainer.train()
    updates = range(1, trainer.progress.update + 1)
    for name in ("before_update", "before_step", "after_update"):
        assert weights_of(trainer, name) == dict.fromkeys(updates, 2.0), name
    assert weights_of(trainer, "before_microbatch") == dict.fromkeys(updates, 8.0 if tried == "no memory" else 4.0)
    assert (hook.num_begun > len(updates)) == (tried not in ("at once", "no memory"))


def test_metrics_keep_no_graph_alive() -> None:
    given: list[weakref.ref[Tensor]] = []

    class Gives(Task):
        """Gives tensors with a graph as metrics, weights and counts."""

        def loss(self, output: Tensor, batch: Any) -> Loss:
            tensors = [output.sigmoid().sum() for _ in range(3)]
            given.extend(map(weakref.ref, tensors))
            metrics = {"value": (tensors[0], 1), "weighted": (1.0, tensors[1])}
            return Loss((output**2).sum(), metrics=metrics, counts={"samples": tensors[2]})

    class Count(Hook):
        def after_update(self, event: Any) -> None:
            gc.collect()
            assert given and not any(one() is not None for one in given)

    unwatched: dict[str, Any] = {"train": Training(check_loss=False), "log": Logging(every_updates=1000, writers=())}
    trainer_of(None, Count(), task=Gives(), **unwatched).train()


class Counted(Task):
    """Has a weight of its own, a perplexity, and a share of misses."""

    derived: Any = {"ppl": lambda metrics: math.exp(metrics["loss"]), "miss": lambda metrics: 1 - metrics["hit"]}  # noqa: RUF012

    def weight(self, batch: Any) -> float:
        return float((batch[1] + 1).sum())

    def loss(self, output: Any, batch: Any) -> Loss:
        output = output.squeeze(-1)
        return Loss((output**2 * (batch[1] + 1)).sum(), metrics={"hit": ((output > 0).sum(), len(output))})


def deriving(task: Any = None, *hooks: Hook, **more: Any) -> Trainer:
    more.setdefault("evaluations", data(size=5, micro=2, shuffle=False))
    return trainer_of(line(), *hooks, task=task or Counted(), **{"updates": 4, **more})


def test_a_perplexity_is_of_the_mean_over_all_and_can_be_followed(tmp_path: Path) -> None:
    best = Best("valid/ppl")
    trainer = deriving(Counted(), best, Evaluate(every_updates=2), folder=tmp_path)
    trainer.train()
    assert best.best_value == min(history(trainer, "valid/ppl"))
    x, y = stacked(points())
    with torch.no_grad():
        output = trainer.model(x).squeeze(-1)
    found = trainer.evaluate("valid")["valid"]
    assert found["ppl"] == pytest.approx(math.exp(float((output**2 * (y + 1)).sum() / (y + 1).sum())), rel=1e-6)
    assert found["miss"] == pytest.approx(1 - float((output > 0).double().mean()), rel=1e-6)
    for loss, ppl in zip(trainer.storage.history("train/loss"), trainer.storage.history("train/ppl"), strict=True):
        assert (ppl.value, ppl.weight) == (math.exp(loss.value), loss.weight)


def test_each_of_several_tasks_derives_its_own_and_so_does_an_engine() -> None:
    plain = type("Plain", (Counted,), {"derived": {}})()
    sets = Mixture({name: data(size=6) for name in ("a", "b")})
    metrics = deriving({"a": Counted(), "b": plain}, data=sets, evaluations=None).train().metrics
    assert metrics["train/a/ppl"] == math.exp(metrics["train/a/loss"])
    assert "train/b/ppl" not in metrics
    found = engine_of(line(), Counted()).evaluate(stacked(points(2)))
    assert found["ppl"] == math.exp(found["loss"])


def test_functions_that_can_not_be_derived_are_refused_or_give_inf_and_nan() -> None:
    def task(**derived: Any) -> Task:
        return type("Mine", (Counted,), {"derived": derived})()

    with refused(ArgumentError, "derived"):
        deriving(task(loss=math.exp))
    for wrong in (task(hit=lambda metrics: 1.0), task(ppl=lambda metrics: metrics["lost"])):
        with pytest.raises(TaskError):
            deriving(wrong).train()
    assert deriving(task(ppl=lambda metrics: math.exp(1e6))).train().metrics["valid/ppl"] == math.inf
    assert math.isnan(deriving(task(rate=lambda metrics: metrics["loss"] / 0.0)).train().metrics["valid/rate"])


@pytest.mark.parametrize("micro", [4, 1])
def test_each_update_tells_if_it_was_clipped_at_any_cut(micro: int) -> None:
    def trained(**more: Any) -> Trainer:
        trainer = trainer_of(data=data(size=4, micro=micro, shuffle=False), **more)
        trainer.train()
        return trainer

    unclipped = trained()
    assert "train/clipped" not in unclipped.storage.names()
    clip = sorted(history(unclipped, "train/grad_norm"))[2]
    clipped = trained(train=Training(clip_norm=clip * 1.001))
    wanted = [float(norm > clip * 1.001) for norm in history(clipped, "train/grad_norm")]
    assert history(clipped, "train/clipped") == wanted and 0 < sum(wanted) < 6
