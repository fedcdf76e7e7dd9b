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
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, MulticlassF1Score

from evenstep import Engine, Failures, Hook, Logging, Loss, MapData, Mixture, Task, Trainer, Training
from evenstep.errors import ArgumentError, TaskError
from evenstep.events import Best, Evaluate, Storage
from evenstep.events.metrics.meters import Meters
from evenstep.parallel import Ddp, Group, Single
from evenstep.precision import Fp16Mixed
from evenstep.train import Retry, Skip
from refused import refused

pytestmark = pytest.mark.filterwarnings("ignore:No .* samples in targets")  # torchmetrics, of short windows
OnRanks = Callable[..., list[Any]]
SIZES = {"a": 6, "b": 5}
UPDATES = 6


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


class Measured(Task):
    """A regression whose output is also observed by metrics."""

    def __init__(self, several: Any, head: str, metrics: Any = None) -> None:
        self.task = several.Regress(head)
        self.metrics = metrics_of() if metrics is None else metrics

    def inputs(self, batch: Any) -> Any:
        return self.task.inputs(batch)

    def weight(self, batch: Any) -> Any:
        return len(batch[0])

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(self.task.loss(output, batch).sum, observed=seen(output, batch))


def mixture(several: Any, count: int, *, micro: int = 2, **more: Any) -> Mixture:
    sets = {
        name: MapData(
            several.samples(count, seed), global_batch_size=size, micro_batch_size=min(micro, size), shuffle=False
        )
        for seed, (name, size) in enumerate(SIZES.items())
    }
    return Mixture(sets, **more)


def measuring(several: Any, *, task: Any = None, **more: Any) -> Trainer:
    model = several.model_of(*SIZES)
    given = {"updates": 4, "log": Logging(every_updates=2), "data": mixture(several, 30)}
    return Trainer(
        model=model,
        task=task or {name: Measured(several, name) for name in SIZES},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        device="cpu",
        **given | more,
    )


def by_hand(batches: list[tuple[Tensor, Any]]) -> dict[str, float]:
    """Each metric over all batches, in one process without the engine."""
    found: dict[str, float] = {}
    for name, metric in metrics_of().items():
        for output, batch in batches:
            given = seen(output, batch)
            metric.update(**given.get(name, {key: given[key] for key in ("preds", "target")}))
        found[name] = float(metric.compute())
    return found


def evaluated(several: Any, group: Any, count: int, micro: int) -> dict[str, float]:
    strategy = Single() if group.ranks == 1 else Ddp(group)
    valid = mixture(several, count, micro=micro, end="max")
    return measuring(several, strategy=strategy, evaluations={"valid": valid}).evaluate("valid")["valid"]


@pytest.mark.parametrize(("ranks", "micro", "count"), [(1, 1, 13), (2, 4, 13), (4, 1, 13), (4, 4, 3)])
def test_an_evaluation_is_of_all_samples_at_once_for_any_cut_and_ranks(
    several: Any, on_ranks: OnRanks, ranks: int, micro: int, count: int
) -> None:
    model = several.model_of(*SIZES)
    results = on_ranks(ranks, lambda group: evaluated(several, group if ranks > 1 else Group(), count, micro))
    assert all(got == results[0] for got in results)  # also on ranks that have seen nothing
    for seed, name in enumerate(SIZES):
        batch = several.stacked(several.samples(count, seed))
        with torch.no_grad():
            wanted = by_hand([(model(batch[0], name), batch)])
        for key, value in wanted.items():
            assert results[0][f"{name}/{key}"] == pytest.approx(value, rel=1e-9, nan_ok=True), key


def test_training_metrics_cover_the_updates_since_the_last_write(several: Any) -> None:
    outputs: list[tuple[Tensor, Any]] = []

    class Noted(Measured):
        def loss(self, output: Any, batch: Any) -> Loss:
            outputs.append((output.detach().clone(), batch))
            return super().loss(output, batch)

    task = {"a": Noted(several, "a"), "b": Measured(several, "b")}
    trainer = measuring(several, task=task, train=Training(check_loss=False))
    trainer.train()
    history = trainer.storage.history("train/a/error")
    assert [record.update for record in history] == [2, 4]
    for record, part in zip(history, (outputs[:6], outputs[6:]), strict=True):
        assert record.value == pytest.approx(by_hand(part)["error"], rel=1e-12)


def test_a_skipped_update_is_not_observed(several: Any) -> None:
    spoilt = several.samples(30, 0)[8][1]  # in update 2

    class Bad(Measured):
        def loss(self, output: Any, batch: Any) -> Loss:
            factor = float("nan") if batch[1][0] == spoilt else 1.0
            return Loss(output.sum() * factor, observed={"value": torch.ones(len(batch[0]))})

    task = {"a": Bad(several, "a", {"count": torchmetrics.SumMetric()}), "b": Measured(several, "b", {})}
    trainer = measuring(several, task=task, failures=Failures(non_finite=Skip()), updates=3)
    trainer.train()
    assert sum(one.value for one in trainer.storage.history("train/a/count")) == 18.0


def test_a_batch_that_is_cut_is_observed_once(several: Any) -> None:
    class Small(Measured):
        failed = 0

        def loss(self, output: Any, batch: Any) -> Loss:
            if len(batch[0]) > 2:
                Small.failed += 1
                raise MemoryError
            return super().loss(output, batch)

    data = mixture(several, 13, micro=6, end="max")
    trainer = measuring(several, task={n: Small(several, n) for n in SIZES}, evaluations={"valid": data})
    got = trainer.evaluate()["valid"]
    assert Small.failed
    assert got == pytest.approx(evaluated(several, Group(), 13, 6), rel=1e-9)


def test_a_resumed_run_has_the_same_metrics(several: Any, tmp_path: Path) -> None:
    def run(name: str, *ends: int) -> list[Any]:
        for end in ends:
            task = {one: Measured(several, one, {"pearson": torchmetrics.PearsonCorrCoef()}) for one in SIZES}
            trainer = measuring(several, task=task, updates=end, folder=tmp_path / name)
            trainer.resume()
            trainer.train()
        return trainer.storage.history("train/b/pearson")

    assert run("stopped", 2, 4) == run("straight", 4)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_collection_of_metrics_is_taken(several: Any, is_whole: bool) -> None:
    collection = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
    metrics = collection if is_whole else {"of": collection}
    task = {name: Measured(several, name, metrics) for name in SIZES}
    names = set(measuring(several, task=task).train().metrics)
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
def test_other_objects_and_taken_names_are_refused(several: Any, metrics: Any) -> None:
    with refused(ArgumentError, "metrics"):
        measuring(several, task={n: Measured(several, n, metrics) for n in SIZES})


class Puts(Hook):
    """Puts a value at each event of an update, the current scale of the model, and a running sum."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.num_begun = 0
        self.sum = torch.zeros(())
        self.scales: list[float] = []

    def _put(self, name: str, update: int) -> None:
        self.trainer.storage.put(f"mine/{name}", 1.0 + self.rank, 2, update=update)

    def before_update(self, event: Any) -> None:
        self.num_begun += 1
        self._put("before_update", event.update)

    def before_microbatch(self, event: Any) -> None:
        self._put("before_microbatch", event.update)

    def before_step(self, event: Any) -> None:
        self._put("before_step", event.update)
        scale = getattr(self.trainer.model, "scale", None)
        if scale is not None:
            self.scales.append(float(scale.detach()))
            self.trainer.storage.put("mine/scale", scale, update=event.update)

    def after_update(self, event: Any) -> None:
        self._put("after_update", event.update)
        self.sum += 1
        self.trainer.storage.put("mine/sum", self.sum, update=event.update)


class Square(Task):
    """Squares; at some batches there is no memory for more than one sample, or the loss is NaN `bad_tries` times."""

    def __init__(self, *, no_memory: bool = False, bad: int = -1, bad_tries: int = 0) -> None:
        self.no_memory, self.bad, self.bad_tries = no_memory, bad, bad_tries

    def loss(self, output: Tensor, batch: Any) -> Any:
        total = ((output.float().squeeze(-1) - batch[1]) ** 2).sum()
        if self.no_memory and len(output) > 1:
            raise torch.OutOfMemoryError("no memory for this")
        if self.bad_tries and self.bad in batch[2].tolist():
            self.bad_tries -= 1
            return total * float("nan")
        return total


def samples() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, generator=generator), torch.tensor(float(n % 4 + 1)), torch.tensor(n))
        for n in range(4 * UPDATES)
    ]


def line() -> nn.Module:
    model = nn.Linear(3, 1)
    with torch.no_grad():  # by no generator, which ranks that are threads would share
        model.weight.copy_(torch.tensor([[0.3, -0.4, 0.5]]))
        model.bias.fill_(0.1)
    return model


def trainer_of(task: Task, *hooks: Hook, model: nn.Module | None = None, micro: int = 2, **more: Any) -> Trainer:
    model = model or line()
    if "epochs" not in more:
        more.setdefault("updates", UPDATES)
    more.setdefault("data", MapData(samples(), global_batch_size=4, micro_batch_size=micro, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Trainer(model=model, task=task, optimizer=optimizer, device="cpu", hooks=hooks, **more)


def put(trainer: Trainer, name: str) -> dict[int, float]:
    """The weights that were put, by update."""
    return {record.update: record.weight for record in trainer.storage.history(f"mine/{name}")}


TRIED: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "at once": lambda: ({}, {}),
    "no memory": lambda: ({"no_memory": True}, {}),
    "overflow": lambda: ({}, {"precision": Fp16Mixed(initial=2.0**40)}),
    "retried": lambda: ({"bad": 9, "bad_tries": 1}, {"failures": Failures(non_finite=Retry(limit=3))}),
    "skipped": lambda: ({"bad": 9, "bad_tries": 9}, {"failures": Failures(non_finite=Skip()), "epochs": 1}),
}


@pytest.mark.parametrize("tried", TRIED)
def test_values_of_hooks_are_recorded_once_per_update(tried: str) -> None:
    of_task, more = TRIED[tried]()
    hook = Puts()
    trainer = trainer_of(Square(**of_task), hook, **more)
    trainer.train()
    updates = range(1, trainer.progress.update + 1)
    for name in ("before_update", "before_step", "after_update"):
        assert put(trainer, name) == dict.fromkeys(updates, 2.0), name
    assert put(trainer, "before_microbatch") == dict.fromkeys(updates, 8.0 if tried == "no memory" else 4.0)
    assert (hook.num_begun > len(updates)) == (tried not in ("at once", "no memory"))


def test_ranks_put_theirs_once_where_one_of_them_retries(on_ranks: OnRanks) -> None:
    def act(group: Group) -> tuple[dict[int, float], float]:
        task = Square(bad=3, bad_tries=1) if group.rank == 1 else Square()
        failures = Failures(non_finite=Retry(limit=3))
        trainer = trainer_of(task, Puts(group.rank), micro=1, strategy=Ddp(group), failures=failures)
        trainer.train()
        return put(trainer, "before_update"), trainer.storage.history("mine/before_update")[-1].value

    for weights, value in on_ranks(2, act):
        assert weights == dict.fromkeys(range(1, UPDATES + 1), 4.0)
        assert value == (1.0 + 2.0) / 4.0


class Counting(nn.Module):
    """Has a parameter that is trained, and a buffer that each forward changes in place."""

    def __init__(self, around: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layer, self.around = line(), around
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.around(self.layer(x) * self.scale)


class Gives(Task):
    """Gives parameters, buffers and tensors with a graph as metrics, weights and counts."""

    derived: Any = {"doubled": lambda metrics: 2 * metrics["samples"]}  # noqa: RUF012

    def __init__(self, model: Counting) -> None:
        self.of = [model]
        self.floats: dict[str, list[float]] = {"scale": [], "seen": [], "doubled": [], "weighted": []}

    def loss(self, output: Tensor, batch: Any) -> Loss:
        model, weight = self.of[0], output.sigmoid().sum()
        given = {"scale": model.scale, "seen": model.seen, "doubled": 2 * model.seen, "weighted": 1 / weight}
        for name, value in given.items():
            self.floats[name].append(float(value.detach()))
        metrics = {"scale": (model.scale, 1), "seen": (model.seen, 1), "weighted": (1.0, weight)}
        return Loss((output**2).sum(), metrics=metrics, counts={"samples": model.seen})


UNWATCHED: dict[str, Any] = {"train": Training(check_loss=False), "log": Logging(every_updates=1000, writers=())}


def test_metrics_keep_no_graph_alive() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Held: ...

    class Hold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.held = Held()
            alive.add(ctx.held)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient

    class Count(Hook):
        def after_update(self, event: Any) -> None:
            gc.collect()
            assert not alive

    model = Counting(Hold.apply)
    trainer_of(Gives(model), Count(), model=model, **UNWATCHED).train()
    storage = Storage(meters=Meters({"all": torchmetrics.CatMetric()}))
    buffer = torch.zeros((), requires_grad=True) * 1
    storage.observe("train/", "all", {"value": buffer}, update=1)
    with torch.no_grad():
        buffer += 7
    (kept,) = storage._meters._meters["train/all"].metric.value
    assert kept == 0 and not kept.requires_grad


def test_a_tensor_of_an_accelerator_is_copied_without_being_read() -> None:
    storage = Storage()
    scalar = torch.empty((), device="meta", requires_grad=True)  # reading it raises
    storage.put("loss", scalar, scalar, update=1)
    ((_, _, total, weight),) = storage._pending
    for copy in (total, weight):
        assert isinstance(copy, Tensor) and copy is not scalar and not copy.requires_grad


class Counted(Task):
    """Has a weight of its own, a perplexity, and a share of misses."""

    derived: Any = {"ppl": lambda metrics: math.exp(metrics["loss"]), "miss": lambda metrics: 1 - metrics["hit"]}  # noqa: RUF012

    def weight(self, batch: Any) -> float:
        return float(batch[1].sum())

    def loss(self, output: Any, batch: Any) -> Loss:
        output = output.squeeze(-1)
        return Loss((output**2 * batch[1]).sum(), metrics={"hit": ((output > 0).sum(), len(output))})


def deriving(task: Any = None, *hooks: Hook, **more: Any) -> Trainer:
    more.setdefault("evaluations", MapData(samples(), global_batch_size=5, micro_batch_size=2, shuffle=False))
    return trainer_of(task or Counted(), *hooks, log=Logging(writers=()), **more)


def test_a_perplexity_is_of_the_mean_over_all_and_can_be_followed(tmp_path: Path) -> None:
    best = Best("valid/ppl")
    trainer = deriving(Counted(), best, Evaluate(every_updates=2), folder=tmp_path)
    trainer.train()
    assert best.best_value == min(record.value for record in trainer.storage.history("valid/ppl"))
    x, weight = (torch.stack([sample[part] for sample in samples()]) for part in (0, 1))
    with torch.no_grad():
        output = trainer.model(x).squeeze(-1)
    found = trainer.evaluate("valid")["valid"]
    assert found["ppl"] == pytest.approx(math.exp(float((output**2 * weight).sum() / weight.sum())), rel=1e-6)
    assert found["miss"] == pytest.approx(1 - float((output > 0).float().mean()), rel=1e-6)
    for loss, ppl in zip(trainer.storage.history("train/loss"), trainer.storage.history("train/ppl"), strict=True):
        assert (ppl.value, ppl.weight) == (math.exp(loss.value), loss.weight)


def test_each_of_several_tasks_derives_its_own_and_so_does_an_engine() -> None:
    class Plain(Counted):
        derived: Any = {}  # noqa: RUF012

    sets = Mixture({name: MapData(samples(), global_batch_size=6) for name in ("a", "b")})
    metrics = deriving({"a": Counted(), "b": Plain()}, data=sets, evaluations=None).train().metrics
    assert metrics["train/a/ppl"] == math.exp(metrics["train/a/loss"])
    assert "train/b/ppl" not in metrics
    model = line()
    engine = Engine(model, Counted(), torch.optim.SGD(model.parameters(), lr=0.01), device="cpu")
    found = engine.evaluate((torch.ones(2, 3), torch.ones(2)))
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
    clip, data, wanted, model = 5.0, samples(), list[float](), line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for update in range(UPDATES):
        x, y = (torch.stack([sample[part] for sample in data[4 * update :][:4]]) for part in (0, 1))
        optimizer.zero_grad()
        ((model(x).squeeze(-1) - y) ** 2).sum().div(4).backward()
        wanted.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip) > clip))
        optimizer.step()
    trainer = trainer_of(Square(), micro=micro, train=Training(clip_norm=clip))
    trainer.train()
    assert 0 < sum(wanted) < UPDATES
    assert [record.value for record in trainer.storage.history("train/clipped")] == wanted
    unclipped = trainer_of(Square())
    unclipped.train()
    assert "train/clipped" not in unclipped.storage.names()
