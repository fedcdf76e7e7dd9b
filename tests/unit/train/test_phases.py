"""Where the time of a run goes, and how far it is: the values of each window, against a clock set by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clock import Clock
from evenstep import Logging, Loss, Task, Trainer, Training
from evenstep.errors import ArgumentError
from evenstep.train import timing as module
from evenstep.train.timing import PHASES
from kit import StopAt, data, history, line, trainer_of
from refused import refused


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class Line(Task):
    """Each part takes a number of seconds of its own."""

    unit = "tokens"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def weight(self, batch: Any) -> float:
        self.clock.now += 1
        return 3.0 * len(batch[0])

    def loss(self, output: Tensor, batch: Any) -> Loss:
        self.clock.now += 10

        def back(_: Tensor) -> None:
            self.clock.now += 100

        loss = ((output.squeeze(-1) - batch[1]) ** 2).sum()
        if loss.requires_grad:
            loss.register_hook(back)
        return Loss(loss)


class Slow(torch.optim.SGD):
    clock: Clock

    def step(self, closure: Any = None) -> None:
        self.clock.now += 1000
        super().step(closure)


Make = Callable[..., Trainer]


@pytest.fixture
def make(clock: Clock, tmp_path: Path) -> Make:
    def made(task: Task | None = None, *hooks: Any, **more: Any) -> Trainer:
        model = line()
        optimizer = Slow(model.parameters(), lr=1e-4)
        optimizer.clock = clock
        log = Logging(every_updates=2, writers=())
        given = {"data": data(8, size=4, micro=2), "updates": 4, "folder": tmp_path, "optimizer": optimizer, "log": log}
        return trainer_of(model, *hooks, task=task or Line(clock), **given | more)

    return made


def last(trainer: Trainer, name: str) -> float:
    return history(trainer, name)[-1]


def test_a_window_says_the_seconds_of_each_phase_per_update(make: Make) -> None:
    trainer = make(train=Training(check_loss=False))
    trainer.train()
    expected = {"weigh": 2, "forward": 20, "backward": 200, "apply": 1000}
    assert {phase: last(trainer, f"perf/{phase}_s") for phase in expected} == expected
    known = {name.removeprefix("perf/").removesuffix("_s") for name in trainer.storage.names()}
    assert known & set(PHASES) - {"data"} == {*expected}  # on a clock that stands still all else took nothing


def test_samples_and_tokens_are_counted_over_windows_and_resumes(make: Make) -> None:
    make(None, StopAt(3)).train()  # in the midst of a window
    trainer = make()
    trainer.resume()
    trainer.train()
    assert (last(trainer, "progress/samples"), last(trainer, "progress/tokens")) == (16, 48)
    again = make(updates=7)
    again.resume()
    again.train()
    assert (last(again, "progress/samples"), last(again, "progress/tokens")) == (28, 84)
    assert last(again, "perf/tokens_per_s") == pytest.approx(12 / last(again, "perf/update_s"))


def test_a_unit_that_is_no_word_is_refused(make: Make, clock: Clock) -> None:
    task = Line(clock)
    task.unit = "tokens / s"
    with refused(ArgumentError, "unit"):
        make(task)
