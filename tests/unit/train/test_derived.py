"""Metrics that are functions of other metrics: of their means, and followed as any."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Logging, Loss, MapData, Mixture, Task, Trainer
from evenstep.errors import ArgumentError, TaskError
from evenstep.events import Best, EarlyStop, Evaluate
from evenstep.parallel import Ddp


class Counted(Task):
    """A loss whose weight is the number of its tokens, and a perplexity."""

    derived: Any = {"ppl": lambda metrics: math.exp(metrics["loss"]), "miss": lambda metrics: 1 - metrics["hit"]}  # noqa: RUF012

    def weight(self, batch: Any) -> float:
        return float(batch[1].sum())

    def loss(self, output: Any, batch: Any) -> Loss:
        each = (output.squeeze(-1) ** 2 * batch[1]).sum()
        return Loss(each, metrics={"hit": ((output.squeeze(-1) > 0).sum(), len(output))})


def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, generator=generator), torch.tensor(float(n % 4 + 1))) for n in range(12)]


def trainer_of(task: Any = None, **more: Any) -> Trainer:
    model = nn.Linear(3, 1)
    with torch.no_grad():  # by no generator, which ranks that are threads would share
        model.weight.copy_(torch.tensor([[0.3, -0.4, 0.5]]))
        model.bias.fill_(0.1)
    more.setdefault("data", MapData(points(), global_batch_size=6, micro_batch_size=2, shuffle=False))
    more.setdefault("evaluations", MapData(points(), global_batch_size=5, micro_batch_size=2, shuffle=False))
    return Trainer(
        model=model,
        task=task or Counted(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        updates=4,
        device="cpu",
        log=Logging(writers=()),
        **more,
    )


def test_a_perplexity_is_that_of_the_mean_over_all_and_not_a_mean_of_perplexities() -> None:
    trainer = trainer_of()
    trainer.train()
    x, weight = (torch.stack([point[part] for point in points()]) for part in (0, 1))
    with torch.no_grad():
        output = trainer.model(x).squeeze(-1)
        mean = float((output**2 * weight).sum() / weight.sum())
        hit = float((output > 0).float().mean())
    found = trainer.evaluate("valid")["valid"]
    assert found["ppl"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert found["miss"] == pytest.approx(1 - hit, rel=1e-6)
    for record in trainer.storage.history("train/loss"):
        (ppl,) = [one for one in trainer.storage.history("train/ppl") if one.update == record.update]
        assert (ppl.value, ppl.weight) == (math.exp(record.value), record.weight)


def test_the_best_and_early_stopping_follow_it(tmp_path: Path) -> None:
    best, stop = Best("valid/ppl"), EarlyStop("valid/ppl", patience_evaluations=9)
    trainer = trainer_of(folder=tmp_path, hooks=[best, stop, Evaluate(every_updates=2)])
    trainer.train()
    assert best.best_value == min(record.value for record in trainer.storage.history("valid/ppl"))
    again = trainer_of(folder=tmp_path, hooks=[Best("valid/ppl"), EarlyStop("valid/ppl", patience_evaluations=9)])
    again.resume()
    assert again.storage.latest("valid/ppl") == trainer.storage.latest("valid/ppl")


def test_two_ranks_derive_what_one_does(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> Any:
        return trainer_of(strategy=Ddp(group)).train().metrics["valid/ppl"]

    alone = trainer_of(strategy=Ddp()).train().metrics["valid/ppl"]
    first, second = on_ranks(2, act)
    assert first == second == pytest.approx(alone, rel=1e-6)


def test_each_of_several_tasks_derives_its_own_and_so_does_an_engine() -> None:
    class Plain(Counted):
        derived: Any = {}  # noqa: RUF012

    sets = {name: MapData(points(), global_batch_size=6) for name in ("a", "b")}
    metrics = trainer_of({"a": Counted(), "b": Plain()}, data=Mixture(sets), evaluations=None).train().metrics
    assert metrics["train/a/ppl"] == math.exp(metrics["train/a/loss"])
    assert "train/b/ppl" not in metrics
    model = nn.Linear(3, 1)
    engine = Engine(model, Counted(), torch.optim.SGD(model.parameters(), lr=0.01), device="cpu")
    found = engine.evaluate((torch.ones(2, 3), torch.ones(2)))
    assert found["ppl"] == math.exp(found["loss"])


def test_what_can_not_be_derived_is_refused_by_name() -> None:
    def task(**derived: Any) -> Task:
        return type("Mine", (Counted,), {"derived": derived})()

    with pytest.raises(ArgumentError):
        trainer_of(task(loss=math.exp))
    with pytest.raises(TaskError):
        trainer_of(task(hit=lambda metrics: 1.0)).train()
    with pytest.raises(TaskError):
        trainer_of(task(ppl=lambda metrics: metrics["lost"])).train()
    trainer = trainer_of(task(ppl=lambda metrics: math.exp(1e6)))
    assert trainer.train().metrics["valid/ppl"] == math.inf
    trainer = trainer_of(task(rate=lambda metrics: metrics["loss"] / 0.0))  # errors of no words, say
    assert math.isnan(trainer.train().metrics["valid/rate"])
