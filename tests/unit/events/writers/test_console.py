import io
from collections.abc import Iterable
from typing import Any

import pytest

from evenstep.errors import ArgumentError
from evenstep.events import ConsoleWriter, Record, TrainBegin
from evenstep.events.writers import console as module


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
    writer.event("train_begin", TrainBegin(update=update, updates=updates, resumed=False))
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
    assert stream.getvalue() == "update 2/100  loss 1.5  lr 0.2  0.5 updates/s  3:16 left\n"


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
    assert stream.getvalue() == "update 1/100  valid/loss 2  valid/accuracy 0.25\n"


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
    assert last == ["update 3/100  loss 3  3 updates/s  0:32 left"]


def test_the_rate_after_a_resume_counts_from_there(clock: Clock) -> None:
    stream = io.StringIO()
    clock.now = 50.0
    writer = opened(stream, update=90)
    clock.now = 51.0
    writer.write(losses([91, 92]))
    assert stream.getvalue().endswith("2 updates/s  0:04 left\n")


def test_a_terminal_gets_a_live_line_and_evaluations_above_it(clock: Clock) -> None:
    stream = Terminal()
    writer = opened(stream)
    clock.now = 1.0
    writer.write(losses([1, 2]))
    writer.write([Record(2, "valid/loss", 2.0, 8.0)])
    writer.close()
    text = stream.getvalue()
    assert "2/100" in text
    assert "valid/loss 2" in text
    assert "loss 1.5" in text
    assert text.endswith("\n") or "\x1b[?25h" in text  # the cursor is given back


def test_a_live_line_draws_only_on_write_and_not_more_often_than_people_can_read(clock: Clock) -> None:
    stream = Terminal()
    writer = opened(stream, every_updates=1)
    clock.now = 1.0
    writer.write(losses([1]))
    size = len(stream.getvalue())
    clock.now = 1.1
    writer.write(losses([2]))
    assert len(stream.getvalue()) == size
    clock.now = 1.3
    writer.write(losses([3]))
    assert len(stream.getvalue()) > size
    writer.close()


def test_a_period_below_one_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="`every_updates` must be a whole number of at least 1"):
        ConsoleWriter(every_updates=0)


def test_long_times_are_told_in_hours(clock: Clock) -> None:
    stream: Any = io.StringIO()
    writer = opened(stream, updates=3602, every_updates=1)
    clock.now = 1.0
    writer.write(losses([1]))
    assert stream.getvalue().endswith("1:00:01 left\n")
