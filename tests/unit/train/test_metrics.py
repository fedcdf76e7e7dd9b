"""Metric objects of tasks in real runs, against torchmetrics fed with the same samples by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, BinaryConfusionMatrix, MulticlassF1Score

from evenstep import Failures, Logging, Loss, MapData, Mixture, Skip, Task, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.events import Storage
from evenstep.events.metrics.meters import Meters
from evenstep.parallel import Ddp, Group, Single

pytestmark = pytest.mark.filterwarnings("ignore:No .* samples in targets")  # torchmetrics, of short windows
OnRanks = Callable[..., list[Any]]
SIZES = {"a": 6, "b": 5}


def metrics_of() -> dict[str, Any]:
    metrics = {
        "auroc": BinaryAUROC(),  # lists of all that was seen
        "error": torchmetrics.MeanSquaredError(),  # sums
        "pearson": torchmetrics.PearsonCorrCoef(),  # values that are not reduced, but stacked
        "largest": torchmetrics.MaxMetric(),
    }
    return {name: metric.set_dtype(torch.float64) for name, metric in metrics.items()}


class Measured(Task):
    """Several's regression, whose output is also looked at by metrics."""

    def __init__(self, several: Any, head: str, metrics: dict[str, Any] | None = None) -> None:
        self.task = several.Regress(head)
        self.metrics = metrics_of() if metrics is None else metrics

    def inputs(self, batch: Any) -> Any:
        return self.task.inputs(batch)

    def weight(self, batch: Any) -> Any:
        return len(batch[0])

    def loss(self, output: Any, batch: Any) -> Loss:
        loss = self.task.loss(output, batch)
        return Loss(loss.sum, observed=seen(output, batch))


def seen(output: Tensor, batch: Any) -> dict[str, Any]:
    return {
        "auroc": {"preds": output.sigmoid(), "target": (batch[1] > 0).long()},
        "largest": {"value": output.float()},
        "preds": output,
        "target": batch[1],
    }


def mixture(several: Any, count: int, *, micro: int = 2, **more: Any) -> Mixture:
    return Mixture(
        {
            name: MapData(
                several.samples(count, seed), global_batch_size=size, micro_batch_size=min(micro, size), shuffle=False
            )
            for seed, (name, size) in enumerate(SIZES.items())
        },
        **more,
    )


def trainer_of(several: Any, model: Any, *, strategy: Any = None, **more: Any) -> Trainer:
    more.setdefault("task", {name: Measured(several, name) for name in SIZES})
    more.setdefault("data", mixture(several, 30))
    return Trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        device="cpu",
        strategy=strategy,
        **{"updates": 4, "log": Logging(every_updates=2)} | more,
    )


def by_hand(batches: list[tuple[Tensor, Any]]) -> dict[str, float]:
    """Each metric over all batches, in one process without the engine."""
    found: dict[str, float] = {}
    for name, metric in metrics_of().items():
        metric.reset()
        for output, batch in batches:
            given = seen(output, batch)
            metric.update(**given.get(name, {key: given[key] for key in ("preds", "target")}))
        found[name] = float(metric.compute())
    return found


def evaluated(several: Any, group: Any, count: int, micro: int) -> tuple[dict[str, float], Any]:
    model = several.model_of(*SIZES)
    trainer = trainer_of(
        several,
        model,
        strategy=Single() if group.ranks == 1 else Ddp(group),
        evaluations={"valid": mixture(several, count, micro=micro, end="max")},
    )
    return trainer.evaluate("valid")["valid"], model


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 4])
def test_an_evaluation_is_that_of_all_samples_at_once_for_any_cut_and_ranks(
    several: Any, on_ranks: OnRanks, ranks: int, micro: int
) -> None:
    count = 13  # the last batches are short, so some ranks see nothing of them
    model = several.model_of(*SIZES)
    results = on_ranks(ranks, lambda group: evaluated(several, group if ranks > 1 else Group(), count, micro)[0])
    for seed, name in enumerate(SIZES):
        batch = several.stacked(several.samples(count, seed))
        with torch.no_grad():
            wanted = by_hand([(model(batch[0], name), batch)])
        for got in results:
            for key, value in wanted.items():
                assert got[f"{name}/{key}"] == pytest.approx(value, rel=1e-9), key
    assert all(got == results[0] for got in results)


def test_a_rank_that_has_seen_nothing_knows_the_value_and_does_not_change_it(several: Any, on_ranks: OnRanks) -> None:
    for got in on_ranks(4, lambda group: evaluated(several, group, 3, 4)[0]):  # one micro-batch per task
        assert got == pytest.approx(evaluated(several, Group(), 3, 4)[0], rel=1e-12)


def test_a_second_evaluation_begins_anew(several: Any) -> None:
    trainer = trainer_of(
        several, several.model_of(*SIZES), evaluations={"valid": mixture(several, 13, end="max")}, updates=1
    )
    assert trainer.evaluate() == trainer.evaluate()


def test_training_metrics_cover_the_updates_since_they_were_written_last(several: Any) -> None:
    outputs: list[tuple[Tensor, Any]] = []

    class Noted(Measured):
        def loss(self, output: Any, batch: Any) -> Loss:
            outputs.append((output.detach().clone(), batch))
            return super().loss(output, batch)

    task = {"a": Noted(several, "a"), "b": Measured(several, "b")}
    trainer = trainer_of(
        several, several.model_of(*SIZES), task=task, train=Training(check_loss=False)
    )  # nobody else asks for losses
    trainer.train()
    history = trainer.storage.history("train/a/error")
    assert [record.update for record in history] == [2, 4]
    for record, part in zip(history, (outputs[:6], outputs[6:]), strict=True):
        assert record.value == pytest.approx(by_hand(part)["error"], rel=1e-12)


def test_an_update_that_is_given_up_is_not_seen(several: Any) -> None:
    class Bad(Measured):
        def loss(self, output: Any, batch: Any) -> Loss:
            loss = super().loss(output, batch)
            spoilt = batch[1][0] == several.samples(30, 0)[8][1]  # in update 2
            return Loss(loss.sum * float("nan") if spoilt else loss.sum, observed=loss.observed)

    counts = {}
    for policy in (Skip(),):
        task = {"a": Bad(several, "a", {"count": torchmetrics.SumMetric()}), "b": Measured(several, "b", {})}
        task["a"].task.loss = lambda output, batch: Loss(output.sum() * 0 + batch[2].sum() * 0 + output.sum())
        trainer = trainer_of(
            several, several.model_of(*SIZES), task=_counting(task), failures=Failures(non_finite=policy), updates=3
        )
        trainer.train()
        counts[type(policy).__name__] = sum(one.value for one in trainer.storage.history("train/a/count"))
    assert counts == {"Skip": 18.0}


def _counting(task: dict[str, Any]) -> dict[str, Any]:
    """The task `a` counts the samples that its metric sees."""
    inner = task["a"].loss

    def loss(output: Any, batch: Any) -> Loss:
        return Loss(inner(output, batch).sum, observed={"value": torch.ones(len(batch[0]))})

    task["a"].loss = loss
    task["b"].metrics = {}
    return task


def test_a_cut_that_is_tried_again_is_seen_once(several: Any) -> None:
    class Small(Measured):
        failed = 0

        def loss(self, output: Any, batch: Any) -> Loss:
            if len(batch[0]) > 2:
                Small.failed += 1
                raise MemoryError
            return super().loss(output, batch)

    model = several.model_of(*SIZES)
    data = mixture(several, 13, micro=6, end="max")
    trainer = trainer_of(several, model, task={n: Small(several, n) for n in SIZES}, evaluations={"valid": data})
    got = trainer.evaluate()["valid"]
    assert Small.failed
    assert got == pytest.approx(evaluated(several, Group(), 13, 6)[0], rel=1e-9)


def test_stopped_and_resumed_it_tells_the_same(several: Any, tmp_path: Path) -> None:
    def run(name: str, *ends: int) -> list[Any]:
        for end in ends:
            task = {one: Measured(several, one, {"pearson": torchmetrics.PearsonCorrCoef()}) for one in SIZES}
            trainer = trainer_of(several, several.model_of(*SIZES), task=task, updates=end, folder=tmp_path / name)
            trainer.resume()
            trainer.train()
        assert len(trainer.storage.history("train/b/pearson")) == 2
        return trainer.storage.history("train/b/pearson")

    assert run("stopped", 2, 4) == run("straight", 4)


def test_numbers_by_class_are_named_and_a_tensor_is_refused(several: Any) -> None:
    for metric, text in (
        (torchmetrics.ClasswiseWrapper(MulticlassF1Score(2, average=None)), ""),
        (BinaryConfusionMatrix(), "must compute one number, but computes a tensor of shape \\[2, 2\\]"),
    ):
        storage = Storage(meters=Meters({"f1": metric}))
        storage.observe("train/", "f1", {"preds": torch.tensor([0, 1]), "target": torch.tensor([0, 0])}, update=1)
        if text:
            with pytest.raises(ArgumentError):
                storage.settle()
        else:
            names = [record.name for record in storage.settle()]
            assert names == ["train/f1/multiclassf1score_0", "train/f1/multiclassf1score_1"]


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"f1": 3}, "the metric `f1` of Measured must be a `torchmetrics.Metric`, but is a int"),
        ({"loss": torchmetrics.SumMetric()}, "none of loss, no_loss"),
        ({"all": torchmetrics.MetricCollection([torchmetrics.SumMetric()])}, "is a collection; give its metrics by"),
    ],
)
def test_what_is_no_metric_is_refused(several: Any, metrics: Any, text: str) -> None:
    with pytest.raises(ArgumentError):
        trainer_of(several, several.model_of(*SIZES), task={n: Measured(several, n, metrics) for n in SIZES})


def test_a_metric_does_not_hold_the_graph_of_what_it_has_seen(several: Any) -> None:
    kept: list[Tensor] = []

    class Keeps(torchmetrics.CatMetric):
        def update(self, value: Tensor) -> None:  # type: ignore[override]
            kept.append(value)

    class Holds(Measured):
        def loss(self, output: Any, batch: Any) -> Loss:
            return Loss(output.sum(), observed={"value": output})

    task = {name: Holds(several, name, {"kept": Keeps(nan_strategy="ignore")}) for name in SIZES}
    with pytest.raises(ArgumentError):
        trainer_of(several, several.model_of(*SIZES), task=task, updates=1).train()
    assert kept
    assert not any(value.requires_grad for value in kept)
