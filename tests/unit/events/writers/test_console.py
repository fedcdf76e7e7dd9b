import io
import re
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_trainer import FakeTrainer

from clock import Clock
from evenstep.events import Bus, ConsoleWriter, EvaluateEvent, Incident, Record, SaveEvent, TrainEvent
from evenstep.events.writers import console as module
from evenstep.events.writers import live


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


def drawn(stream: io.StringIO) -> str:
    """The last line that was drawn, without what moves the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").rstrip("\n").splitlines()[-1]


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


def test_each_period_is_a_line_and_the_rest_is_one_at_the_end(clock: Clock, trainer: Any) -> None:
    stream = io.StringIO()
    writer = opened(trainer, stream, update=90, updates=None)
    clock.now = 1.0
    writer.write(losses(range(91, 96)))
    writer.close()
    writer.close()
    assert stream.getvalue().splitlines() == [
        "update 92  loss 91.5    5 updates/s",
        "update 94  loss 93.5    5 updates/s",
        "update 95  loss 95      5 updates/s",
    ]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_start_shows_parameters_device_and_length(is_resumed: bool, trainer: Any) -> None:
    trainer.folder = None if is_resumed else Path("runs/x")
    trainer.model.bias.requires_grad_(False)
    stream = io.StringIO()
    writer = ConsoleWriter(stream=stream)
    Bus([writer], trainer)
    if is_resumed:
        writer.before_train(TrainEvent(update=7, updates=None, resumed=True))
        expected = "resuming 6 parameters on cpu from update 7 until the data ends\n"
    else:
        writer.before_train(TrainEvent(update=0, updates=100, resumed=False))
        expected = "training 6 parameters on cpu from update 0 to update 100, in runs/x\n"
    assert stream.getvalue() == expected


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
        "update 3  valid/loss 1       valid/accuracy 0.5     in 2 min",
        "the evaluation of valid failed after update 3, 2 min",
        "saved update 3 in runs/x/checkpoints/step-00000003",
        "update 4 was not saved",
        "overflow at update 5: the scale was halved",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(59.94, "59.9 s"), (90, "2 min"), (5400, "1 h 30 min")])
def test_the_end_shows_the_outcome_and_an_error_once(clock: Clock, trainer: Any, seconds: float, text: str) -> None:
    stream = io.StringIO()
    writer = opened(trainer, stream)
    clock.now = seconds
    failed = TrainEvent(update=1, outcome="failed", error=ValueError("too bad"))
    writer.after_train(TrainEvent(update=9, outcome="done", reason="all 9 updates are done"))
    writer.after_train(failed)
    writer.on_incident(Incident(kind="failed", update=1, message="ValueError: too bad"))
    writer.after_train(failed)
    assert stream.getvalue().splitlines() == [
        f"done, 9 updates committed, {text}: all 9 updates are done",
        f"failed, 1 update committed, {text}: ValueError: too bad",
        "failed at update 1: ValueError: too bad",
        f"failed, 1 update committed, {text}",
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


def test_above_a_live_line_there_is_one_line_a_second(clock: Clock, terminal: Terminal, trainer: Any) -> None:
    writer = opened(trainer, terminal, every_updates=1)
    for update in range(1, 31):
        clock.now += 0.125
        writer.write(losses([update]))
    writer.close()
    lines = re.findall(r"update (\d+)/100 +loss ([\d.]+) ", terminal.getvalue())
    assert lines == [("1", "1"), ("9", "5.5"), ("17", "13.5"), ("25", "21.5"), ("30", "28")]


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_a_live_line_fits_with_its_newest_values(
    terminal: Terminal, trainer: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    writer = opened(trainer, terminal, updates=123_456, every_updates=1)
    assert writer._live is not None
    for update in (20_000, 30_000):
        trainer.progress.update = update
        names = ("train/lr", "train/a_long_name", "train/loss")
        writer.write([Record(update, name, 1.2345e-05, 1.0) for name in names])
        writer._live.draw()
    line = drawn(terminal)
    writer.close()
    assert len(line) <= int(columns)
    assert "━" in line
    count, *values, pace, _, left = line.split()[1:]
    assert (count, left) == ("30000/123456", "left") and pace.endswith("/s")
    assert values[:2] == ["loss", "1.234e-05"] and ("a_long_name" in values) == (columns == "120")


def test_a_live_line_moves_while_nothing_is_written(
    terminal: Terminal, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "TICK_S", 0.01)
    writer = opened(trainer, terminal)
    size = len(terminal.getvalue())
    moved = 0
    until = time.monotonic() + 30
    while moved < 3 and time.monotonic() < until:
        time.sleep(0.02)
        moved += len(terminal.getvalue()) > size
        size = len(terminal.getvalue())
    writer.close()
    assert moved == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "evenstep-live-line"]


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", "unknown"), ("CI", "true")])
def test_a_terminal_without_a_cursor_gets_plain_lines(
    clock: Clock, terminal: Terminal, trainer: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    writer = opened(trainer, terminal)
    clock.now = 4.0
    writer.write(losses([1, 2]))
    writer.close()
    assert terminal.getvalue().endswith("\nupdate 2/100    loss 1.5     0.5 updates/s  3:16 left\n")


def test_a_notebook_gets_a_live_line_in_its_cell(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1), display=SimpleNamespace())
    notebook.display.display = lambda data, raw, display_id: handle
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook.display)
    writer = opened(trainer, None, updates=4)
    writer.write(losses([1, 2]))
    writer.close()
    assert shown[0] == "update 0/4" and shown[-1].endswith("loss 2")
    assert re.search(r"\nupdate 2/4  loss 1.5     .*/s\n$", capsys.readouterr().out)


def test_a_program_without_standard_output_has_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert not live.is_watched()
    assert live.live_on(None, lambda: pytest.fail("a live line asked for its content")) is None
