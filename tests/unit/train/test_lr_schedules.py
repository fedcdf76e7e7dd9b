"""Learning rates of whole runs: by epoch, by evaluation and by group, cut anywhere and resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import EarlyStop, Evaluation, Hook, MapData, Trainer
from evenstep.contrib.multitask import Scheduled
from evenstep.data import StreamData
from evenstep.errors import ArgumentError, HookError
from evenstep.optim.schedules import (
    Constant,
    Cosine,
    Linear,
    Listed,
    LrSchedule,
    Multiplicative,
    PerGroup,
    Plateau,
    Step,
)
from evenstep.train.build import lr_schedule_of
from kit import engine_of, line, net, points
from kit import trainer_of as trainer_of_kit
from refused import refused
from same import assert_same

POINTS = points(20)


class Rates(Hook):
    """Remembers the rates of each update; stops where it is told to."""

    def __init__(self, stop: int | None = None) -> None:
        self.by_update: dict[int, tuple[float, ...]] = {}
        self.stop = stop

    def after_update(self, event: Any) -> None:
        self.by_update[event.update] = tuple(group["lr"] for group in self.trainer.optimizer.param_groups)
        if event.update == self.stop:
            self.trainer.request_stop("test")

    @property
    def first(self) -> list[float]:
        return [one[0] for one in self.by_update.values()]


def valid() -> dict[str, Any]:
    return {"valid": MapData(POINTS[:6], global_batch_size=6, shuffle=False)}


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [*model[0].parameters()], "lr": 0.5, "name": "body"},  # type: ignore[index]
        {"params": [*model[2].parameters()], "lr": 0.25, "name": "head"},  # type: ignore[index]
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def trainer_of(rates: Rates, schedule: LrSchedule, *hooks: Hook, **more: Any) -> Trainer:
    model = net()
    more.setdefault("data", MapData(POINTS, global_batch_size=8))
    if "epochs" not in more:
        more.setdefault("updates", 12)
    return trainer_of_kit(model, rates, *hooks, optimizer=sgd_of(model), lr_schedule=schedule, **more)


def slow_plateau(**more: Any) -> Plateau:
    return Plateau(**{"factor": 0.5, "patience_evaluations": 1, "min_delta": 10.0, **more})


def test_a_rate_by_epoch_is_that_of_the_batch_of_the_update() -> None:
    """20 samples by 8 are 3 updates an epoch, the last of which is short."""
    rates = Rates()
    trainer_of(rates, Multiplicative(factors=(1.0, 0.5)), epochs=4).train()
    assert rates.first == [0.5] * 6 + [0.25] * 3 + [0.125] * 3


def test_a_rate_by_epoch_follows_a_stream_whose_length_nobody_knows() -> None:
    rates = Rates()
    stream = StreamData([*POINTS], global_batch_size=8)
    trainer_of(rates, Step(every=1, factor=0.5, unit="epochs"), data=stream, updates=9).train()
    assert rates.first == [0.5] * 3 + [0.25] * 3 + [0.125] * 3


def test_each_group_follows_its_own_schedule() -> None:
    rates = Rates()
    schedule = PerGroup({"head": Listed(factors=((1, 1.0), (3, 0.5)))}, Linear(end_factor=0.0))
    result = trainer_of(rates, schedule, updates=4).train()
    assert rates.first == pytest.approx([0.5, 1 / 3, 1 / 6, 0.0], rel=1e-12)
    assert [one[1] for one in rates.by_update.values()] == [0.25, 0.25, 0.125, 0.125]
    assert result.metrics["train/lr/head"] == 0.125


SCHEDULES: dict[str, Callable[[], LrSchedule]] = {
    "by epoch": lambda: Multiplicative(factors=(0.5, 0.8), warmup_updates=5),
    "plateau": lambda: slow_plateau(patience_evaluations=2),
    "plateaus of groups": lambda: PerGroup({"head": slow_plateau()}, slow_plateau(patience_evaluations=2, factor=0.1)),
}


@pytest.mark.parametrize("stop", [2, 7])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_resumed_run_has_the_rates_and_bits_of_the_undisturbed_one(kind: str, stop: int, tmp_path: Path) -> None:
    def run(stop: int | None, folder: Path | None) -> tuple[Trainer, Rates]:
        rates, each = Rates(stop), Evaluation(every_updates=1)
        trainer = trainer_of(rates, SCHEDULES[kind](), folder=folder, evaluations=valid(), evaluation=each, updates=10)
        if folder:
            trainer.resume()
        trainer.train()
        return trainer, rates

    (whole, expected), (_, before), (second, after) = run(None, None), run(stop, tmp_path), run(None, tmp_path)
    assert {**before.by_update, **after.by_update} == expected.by_update
    for part in ("model", "lr_schedule"):
        assert_same(whole.state_dict()[part], second.state_dict()[part])
    assert len({*expected.by_update.values()}) > 1, "the schedule changed nothing"


def test_a_state_that_is_loaded_has_the_memory_of_its_plateau_or_resets_it(tmp_path: Path) -> None:
    schedule = slow_plateau(patience_evaluations=3)
    trainer = trainer_of(Rates(), schedule, evaluations=valid(), folder=tmp_path)
    trainer.evaluate()
    trainer.evaluate()
    state = trainer.state_dict()
    json.dumps(state["lr_schedule"])
    trainer.evaluate()
    assert schedule.state["evaluations_since_best"] == 2
    trainer.load_state_dict(state)
    assert schedule.state["evaluations_since_best"] == 1
    trainer.load_state_dict({name: part for name, part in state.items() if name != "lr_schedule"})
    assert schedule.state["evaluations_since_best"] == 0


def test_a_table_names_its_kind_or_is_a_constant() -> None:
    with refused(ArgumentError, "lr_schedule"):
        lr_schedule_of({"type": "MultiStepLR", "milestones": [8, 11]})
    assert lr_schedule_of({"warmup_updates": 3}) == lr_schedule_of({"kind": "constant", "warmup_updates": 3})


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda: trainer_of(Rates(), Plateau()).train(), HookError),
        (lambda: trainer_of(Rates(), Constant(), EarlyStop(patience_evaluations=1)).train(), HookError),
        (lambda: trainer_of(Rates(), PerGroup({"heat": Constant()})), ArgumentError),
        (lambda: engine_of(line(), lr_schedule=Step(every=1, unit="epochs"), updates=9), ArgumentError),
        *(
            (lambda schedule=schedule: Scheduled({"a": schedule}), ArgumentError)
            for schedule in (Step(every=1, unit="epochs"), Plateau(), PerGroup({"a": Cosine()}))
        ),
    ],
)
def test_a_schedule_that_lacks_its_evaluations_groups_or_epochs_is_refused(act: Any, error: Any) -> None:
    with pytest.raises(error):
        act()
