import io
import re
import sys
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.events import ConsoleWriter, Record, TrainEvent
from evenstep.events.writers import console as module
from evenstep.events.writers import live


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def opened(stream: io.StringIO, *, update: int = 0, updates: int | None = 100, every_updates: int = 2) -> ConsoleWriter:
    writer = ConsoleWriter(every_updates=every_updates, stream=stream)
    writer.open(None, update)
    writer.event("train_begin", TrainEvent(update=update, updates=updates, resumed=False))
    return writer


def losses(updates: Iterable[int]) -> list[Record]:
    return [Record(update, "train/loss", float(update), 1.0) for update in updates]


def test_a_line_comes_every_period_with_weighted_means_the_latest_rate_and_the_time_left(clock: Clock) -> None:
    stream = io.StringIO()
    writer = opened(stream)
    clock.now = 4.0
    records = [
        Record(1, "train/loss", 3.0, 1.0),
        Record(1, "train/lr", 0.1, 1.0),
        Record(2, "train/loss", 1.0, 3.0),
        Record(2, "train/lr", 0.2, 1.0),
    ]
    writer.write(records)
    assert stream.getvalue() == "update 2/100    loss 1.5  lr 0.2  0.5 updates/s  3:16 left\n"


def test_several_periods_at_once_are_several_lines(clock: Clock) -> None:
    stream = io.StringIO()
    writer = opened(stream, updates=None)
    clock.now = 1.0
    writer.write(losses(range(1, 5)))
    assert stream.getvalue().splitlines() == ["update 2  loss 1.5  4 updates/s", "update 4  loss 3.5  4 updates/s"]


def test_an_evaluation_is_shown_whenever_it_comes(clock: Clock) -> None:
    stream = io.StringIO()
    writer = opened(stream, every_updates=1000)
    writer.write(losses([1]))
    writer.write([Record(1, "valid/loss", 2.0, 8.0), Record(1, "valid/accuracy", 0.25, 8.0)])
    assert stream.getvalue() == "update 1/100    valid/loss 2  valid/accuracy 0.25\n"


def test_numbers_of_the_timer_and_of_groups_are_left_to_the_files(clock: Clock) -> None:
    stream = io.StringIO()
    writer = opened(stream, every_updates=1)
    writer.write([Record(1, "perf/update_s", 2.0, 8.0), Record(1, "train/lr/0", 0.25, 8.0)])
    assert stream.getvalue() == ""


def test_what_is_left_of_a_period_is_shown_at_the_end_once(clock: Clock) -> None:
    stream = io.StringIO()
    writer = opened(stream)
    clock.now = 1.0
    writer.write(losses([1, 2, 3]))
    writer.close()
    writer.close()
    last = stream.getvalue().splitlines()[1:]
    assert last == ["update 3/100    loss 3    3 updates/s  0:32 left"]


def test_the_rate_after_a_resume_counts_from_there(clock: Clock) -> None:
    stream = io.StringIO()
    clock.now = 50.0
    writer = opened(stream, update=90)
    clock.now = 51.0
    writer.write(losses([91, 92]))
    assert stream.getvalue().endswith("2 updates/s  0:04 left\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    return Terminal()


def drawn(stream: io.StringIO) -> str:
    """The last line that was drawn, without what moves the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").rstrip("\n").splitlines()[-1]


def test_a_terminal_gets_a_live_line_and_what_is_said_at_logs_stays_above_it(clock: Clock, terminal: Terminal) -> None:
    writer = opened(terminal)
    clock.now = 1.0
    writer.write(losses([1, 2]))
    writer.write([Record(2, "valid/loss", 2.0, 8.0)])
    writer.close()
    text = terminal.getvalue()
    assert "update 2/100    loss 1.5  2/s\n" in text
    assert "update 2/100    valid/loss 2\n" in text
    assert "\x1b[?25h" in text  # the cursor is given back


def test_over_a_live_line_there_is_one_line_a_second_of_all_updates_since(clock: Clock, terminal: Terminal) -> None:
    writer = opened(terminal, every_updates=1)
    for update in range(1, 31):
        clock.now += 0.125
        writer.write(losses([update]))
    writer.close()
    lines = re.findall(r"update (\d+)/100 +loss ([\d.]+) ", terminal.getvalue())
    assert lines == [("1", "1"), ("9", "5.5"), ("17", "13.5"), ("25", "21.5"), ("30", "28")]


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_bar_update_loss_rate_and_time_left_are_seen_at_80_columns(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    writer = opened(terminal, updates=123_456, every_updates=1)
    now = [0]
    writer.follow(lambda: now[0])
    writer.event("train_begin", TrainEvent(update=0, updates=123_456, resumed=False))
    assert writer._live is not None
    for update in (20_000, 30_000):
        now[0] = update
        writer.write(
            [Record(update, name, 1.2345e-05, 1.0) for name in ("train/lr", "train/a_long_name", "train/loss")]
        )
        writer._live.draw()
    line = drawn(terminal)
    writer.close()
    assert len(line) <= int(columns)
    assert "━" in line
    count, *values, pace, _, left = line.split()[1:]
    assert (count, left) == ("30000/123456", "left") and pace.endswith("/s")
    assert values[:2] == ["loss", "1.234e-05"] and ("a_long_name" in values) == (columns == "120")


def test_a_live_line_moves_while_nothing_is_written(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_S", 0.01)
    writer = opened(terminal)
    size, moved, until = len(terminal.getvalue()), 0, time.monotonic() + 30
    while moved < 3 and time.monotonic() < until:
        time.sleep(0.02)
        moved, size = moved + (len(terminal.getvalue()) > size), len(terminal.getvalue())
    writer.close()
    assert moved == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "evenstep-live-line"]


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", "unknown"), ("CI", "true")])
def test_a_terminal_without_a_cursor_gets_a_plain_line_each_period(
    clock: Clock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    writer = opened(terminal)
    clock.now = 4.0
    writer.write(losses([1, 2]))
    writer.close()
    assert terminal.getvalue() == "update 2/100    loss 1.5  0.5 updates/s  3:16 left\n"


def test_a_notebook_gets_a_live_line_in_its_cell(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1), display=SimpleNamespace())
    notebook.display.display = lambda data, raw, display_id: handle
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook.display)
    writer = ConsoleWriter(every_updates=2)
    writer.open(None, 0)
    writer.event("train_begin", TrainEvent(update=0, updates=4, resumed=False))
    clock.now = 4.0
    writer.write(losses([1, 2]))
    writer.close()
    assert shown == ["update 0/4", "update 2/4  loss 2"]
    assert capsys.readouterr().out == "update 2/4  loss 1.5  0.5/s\n"


def test_long_times_are_told_in_hours(clock: Clock) -> None:
    stream: Any = io.StringIO()
    writer = opened(stream, updates=3602, every_updates=1)
    clock.now = 1.0
    writer.write(losses([1]))
    assert stream.getvalue().endswith("1:00:01 left\n")


def test_a_program_without_standard_output_has_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert not live.is_watched()
    assert live.live_on(None, lambda: pytest.fail("a live line asked for progress")) is None
