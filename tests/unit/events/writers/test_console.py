import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import FakeTrainer

from clock import Clock
from evenstep.events import Bus, ConsoleWriter, EvaluateEvent, Incident, Record, SaveEvent, TrainEvent
from evenstep.events.writers import console as module


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.0)
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    return Terminal()


def opened(
    trainer: FakeTrainer,
    stream: io.StringIO | None,
    *,
    update: int = 0,
    updates: int | None = 100,
    every_updates: int = 2,
) -> ConsoleWriter:
    """A writer whose training has begun; the line that says so is removed from a stream."""
    writer = ConsoleWriter(every_updates=every_updates, stream=stream)
    Bus([writer], trainer)
    writer.open(None, update)
    writer.before_train(TrainEvent(update=update, updates=updates))
    if isinstance(stream, io.StringIO) and not isinstance(stream, Terminal):
        stream.seek(0)
        stream.truncate()
    return writer


def losses(updates: Iterable[int]) -> list[Record]:
    return [Record(update, "train/loss", float(update), 1.0) for update in updates]


def test_a_line_shows_weighted_means_the_latest_rate_and_the_time_left(clock: Clock, trainer: Any) -> None:
    stream = io.StringIO()
    writer = opened(trainer, stream)
    clock.now = 4.0
    writer.write(
        [
            Record(1, "train/loss", 3.0, 1.0),
            Record(1, "train/lr", 0.1, 1.0),
            Record(2, "train/loss", 1.0, 3.0),
            Record(2, "train/lr", 0.2, 1.0),
            Record(2, "perf/update_s", 2.0, 8.0),  # left to the files, as are those of groups
            Record(2, "train/lr/0", 0.25, 8.0),
        ]
    )
    assert stream.getvalue() == "update 2/100    loss 1.5     lr 0.2     0.5 updates/s  3:16 left\n"


def test_evaluations_checkpoints_and_incidents_are_one_line_each(clock: Clock, trainer: Any) -> None:
    stream = io.StringIO()
    writer = opened(trainer, stream, updates=None)
    metrics = {"valid/loss": 1.0, "valid/accuracy": 0.5}
    writer.before_evaluate(EvaluateEvent(update=3, name="valid"))
    writer.write([Record(3, name, value, 8.0) for name, value in metrics.items()])
    clock.now = 90.0
    writer.after_evaluate(EvaluateEvent(update=3, name="valid", metrics=metrics))
    writer.after_evaluate(EvaluateEvent(update=3, name="valid"))
    writer.after_save(SaveEvent(update=3, path=Path("runs/x/checkpoints/step-00000003")))
    writer.after_save(SaveEvent(update=4))
    writer.on_incident(Incident(kind="overflow", update=5, message="the scale was halved"))
    assert stream.getvalue().splitlines() == [
        "update 3  valid/loss 1       valid/accuracy 0.5     in 1:30",
        "the evaluation of valid failed after update 3",
        "saved update 3 in runs/x/checkpoints/step-00000003",
        "update 4 was not saved",
        "overflow at update 5: the scale was halved",
    ]


def test_the_end_shows_the_outcome_and_an_error_once(clock: Clock, trainer: Any) -> None:
    stream = io.StringIO()
    writer = opened(trainer, stream)
    clock.now = 5400
    failed = TrainEvent(update=1, outcome="failed", error=ValueError("too bad"))
    writer.after_train(TrainEvent(update=9, outcome="done", reason="all 9 updates are done"))
    writer.after_train(failed)
    writer.on_incident(Incident(kind="failed", update=1, message="ValueError: too bad"))
    writer.after_train(failed)
    assert stream.getvalue().splitlines() == [
        "done, 9 updates committed, 1:30:00: all 9 updates are done",
        "failed, 1 update committed, 1:30:00: ValueError: too bad",
        "failed at update 1: ValueError: too bad",
        "failed, 1 update committed, 1:30:00",
    ]


def test_lines_stay_above_a_live_line(clock: Clock, terminal: Terminal, trainer: Any) -> None:
    writer = opened(trainer, terminal)
    clock.now = 1.0
    writer.write(losses([1, 2]))
    writer.after_evaluate(EvaluateEvent(update=2, name="valid", metrics={"valid/loss": 2.0}))
    writer.on_incident(Incident(kind="report", update=2, message="a sentence of several words " * 5))
    writer.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "update 2/100    loss 1.5     2/s" in text
    assert "update 2/100    valid/loss 2       in 1.0 s" in text
    assert text.count("sentence") == text.count("several") == text.count("words") == 5  # none is broken
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is given back
