"""What may change when a run goes on: from the library, and from the command line."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Hook, Logging, MapData, Mixture, Task, Trainer, Training
from evenstep.contrib.multitask import GradNorm, Uncertainty
from evenstep.errors import CheckpointError
from evenstep.events import Best, EarlyStop, Evaluate, EvaluateEvent, Incident, UpdateEvent
from evenstep.precision import Fp16Mixed
from evenstep.train.state.settings import LEAVE_NO_TRACE, MAY_CHANGE
from refused import refused

EVALUATED = ["--evaluation.every_updates", "1"]


class Square(Task):
    """Squares; the distance as a metric."""

    def loss(self, output: Tensor, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


class Heard(Hook):
    """What it heard."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.evaluations = 0

    def on_incident(self, event: Incident) -> None:
        self.said.append(event.message)

    def after_evaluate(self, event: EvaluateEvent) -> None:
        self.evaluations += 1


class Counts(Hook):
    """A hook with state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def after_update(self, event: UpdateEvent) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def trainer_of(folder: Path, heard: Heard, *hooks: Hook, updates: int | None = 4, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    pairs = [(row, row.sum(dim=0, keepdim=True)) for row in torch.randn(16, 2)]
    return Trainer(
        model=model,
        task=Square(),
        optimizer=torch.optim.SGD(model.parameters(), lr=more.pop("lr", 0.05)),
        data=MapData(pairs, global_batch_size=4),
        evaluations={"valid": MapData(pairs, global_batch_size=16, shuffle=False)},
        updates=updates,
        folder=folder,
        device="cpu",
        hooks=[heard, Evaluate(every_updates=1), *hooks],
        **more,
    )


def gone_on(folder: Path, before: list[Hook], after: list[Hook], **more: Any) -> tuple[Trainer, list[str]]:
    trainer_of(folder, Heard(), *before, **more.pop("first", {})).train()
    heard = Heard()
    trainer = trainer_of(folder, heard, *after, updates=6, **more)
    trainer.resume()
    trainer.train()
    assert trainer.progress.update == 6
    return trainer, heard.said


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], [EarlyStop(patience_evaluations=9)]),
        ([Best()], []),
        ([Best("valid/loss")], [Best("valid/loss", mode="max")]),
        ([], [Counts()]),
        ([Counts()], []),
    ],
    ids=["early stop is added", "best is dropped", "best of another mode", "own is added", "own is dropped"],
)
def test_hooks_may_change_when_a_run_goes_on_and_it_is_reported(
    before: list[Hook], after: list[Hook], tmp_path: Path
) -> None:
    _, said = gone_on(tmp_path, before, after)
    assert len(said) == 1
    assert (after or before)[0].name in said[0]


def test_what_is_the_same_goes_on_and_nothing_is_said(tmp_path: Path) -> None:
    counts = Counts()
    _, said = gone_on(tmp_path, [Counts(), Best()], [counts, Best()])
    assert said == []
    assert counts.count == 6


def test_an_average_may_be_added_and_begins_as_a_copy_of_the_parameters(tmp_path: Path) -> None:
    trainer, said = gone_on(tmp_path, [], [], train=Training(ema=Ema(decay=1 - 1e-12, decay_warmup=False)), lr=0.05)
    words = "the average of the parameters is new and begins as a copy of them"
    assert said == [f"the run goes on with changes: {words}."]
    saved = trainer_of(tmp_path / "other", Heard(), updates=4)
    saved.train()
    average = trainer.state_dict()["ema"]
    torch.testing.assert_close(average["weight"], saved.model.get_parameter("weight").detach())


def test_an_average_may_be_dropped_and_it_is_said(tmp_path: Path) -> None:
    _, said = gone_on(tmp_path, [], [], first={"train": Training(ema=Ema(decay=0.9))})
    assert said == ["the run goes on with changes: the average of the parameters is dropped."]


def built(folder: Path, heard: Heard, updates: int = 2, optimizer: Any = None, **more: Any) -> Trainer:
    """A trainer of two tasks, which has something to combine, with SGD unless another is asked for."""
    more = deepcopy(more)  # each trainer has its own
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    rows = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    data = {name: MapData([(row, row.sum(dim=0, keepdim=True)) for row in rows], global_batch_size=4) for name in "ab"}
    return Trainer(
        model=model,
        task={name: Square() for name in data},
        optimizer=(optimizer or sgd())(model.parameters()),
        data=Mixture(data),
        updates=updates,
        folder=folder,
        device="cpu",
        hooks=heard,
        **more,
    )


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return of(torch.optim.SGD, **options)


def of(kind: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, **{"lr": 0.01, **options})

    return make


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "optimizer": ({}, {"optimizer": sgd(lr=0.5)}),
    "optimizer, a tensor": (
        {"optimizer": sgd(lr=torch.tensor(0.25), foreach=True)},
        {"optimizer": sgd(lr=torch.tensor(0.5), foreach=True)},
    ),
    "lr_schedule": ({}, {"lr_schedule": "linear"}),
    "lr_schedule, gone": ({"lr_schedule": "linear"}, {"lr_schedule": None}),
    "lr_schedule, its end": ({"lr_schedule": "linear"}, {"lr_schedule": {"kind": "linear", "end_factor": 0.5}}),
    "train.clip_norm": ({}, {"train": Training(clip_norm=1.0)}),
    "train.norm_statistics": ({}, {"train": Training(norm_statistics="frozen")}),
    "train.coefficients": (
        {"train": Training(coefficients={"a": 0.5})},
        {"train": Training(coefficients={"a": 0.25})},
    ),
    "train.coefficients, learned": (
        {"train": Training(coefficients=Uncertainty())},
        {"train": Training(coefficients=Uncertainty(regression=["a"]))},
    ),
    "train.compile": ({}, {"train": Training(compile="model")}),
    "train.combine": ({"train": Training(combine=GradNorm())}, {"train": Training(combine=GradNorm(alpha=1.0))}),
    "precision": ({"precision": Fp16Mixed()}, {"precision": Fp16Mixed(growth_updates=7)}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] if one == "train.compile" else []) for one in SETTINGS]
)
def test_other_settings_of_updates_are_refused_unless_they_are_accepted(name: str, tmp_path: Path) -> None:
    before, after = SETTINGS[name]

    def fresh() -> dict[str, Any]:
        return deepcopy(before | after)  # each trainer with a loss scale, learned coefficients … of its own

    built(tmp_path, Heard(), **deepcopy(before)).train()
    trainer = built(tmp_path, Heard(), updates=3, **fresh())
    with refused(CheckpointError, name.partition(",")[0]):
        trainer.resume()
    assert trainer.progress.update == 0
    heard = Heard()
    again = built(tmp_path, heard, updates=3, **fresh())
    again.resume(new_settings=True)
    assert again.train().update == 3
    assert any("goes on with changes" in said for said in heard.said)
    later = built(tmp_path, Heard(), updates=4, **fresh())
    later.resume()  # accepted settings are the run's from there on
    assert later.train().update == 4


def test_every_option_of_an_update_is_compared_or_leaves_no_trace() -> None:
    options = {f"train.{one.name}" for one in fields(Training)}
    silent = {f"train.{name}" for name in LEAVE_NO_TRACE}
    assert options - silent - {*MAY_CHANGE} == {
        name for name in SETTINGS if name.startswith("train.") and "," not in name
    }


def test_an_average_that_moves_otherwise_is_said(tmp_path: Path) -> None:
    first = {"train": Training(ema=Ema(decay=0.9))}
    _, said = gone_on(tmp_path, [], [], first=first, train=Training(ema=Ema(decay=0.5)))
    words = "`train.ema.decay` was 0.9 and is now 0.5"
    assert said == [f"the run goes on with changes: {words}."]


def stopped_early(folder: Path) -> None:
    trainer = trainer_of(folder, Heard(), EarlyStop("valid/loss", "max", patience_evaluations=2), updates=20)
    result = trainer.train()
    assert "did not improve in 2 evaluations" in result.reason
    assert result.update == 3


@pytest.mark.parametrize(
    ("hooks", "until", "reports"),
    [
        ([EarlyStop("valid/loss", "max", patience_evaluations=5)], 6, 0),
        ([EarlyStop("valid/loss", "max", patience_evaluations=2)], 5, 1),
        ([], 20, 1),
    ],
    ids=["more patience", "as it was", "without"],
)
def test_an_early_stopped_run_goes_on_when_it_is_resumed(
    hooks: list[Hook], until: int, reports: int, tmp_path: Path
) -> None:
    stopped_early(tmp_path)
    heard = Heard()
    trainer = trainer_of(tmp_path, heard, *hooks, updates=20)
    trainer.resume()
    assert trainer.train().update == until
    assert len(heard.said) == reports


def used(folder: Path) -> None:
    trainer_of(folder, Heard(), log=Logging(writers=("jsonl", "csv", "console"))).train()
