"""The benchmarks' own machinery, on contenders whose work and time are known."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import run  # noqa: E402 - the folder of the benchmarks must be on the path first
from contenders.bare import train_ordinary, train_tuned  # noqa: E402
from contenders.evenstep_ import train as train_evenstep  # noqa: E402
from harness.feed import Feed  # noqa: E402
from harness.rounds import TAIL_UPDATES, Train, chunk_of, interleave  # noqa: E402
from harness.row import Row, Times, compared, read_rows, table, write_rows  # noqa: E402
from harness.work import Work, mlp  # noqa: E402

SLEEP_S = 0.002


def counting(seen: list[tuple[str, int]], name: str) -> Train:
    def train(model: nn.Module, feed: Feed, work: Work) -> list[float]:
        for place, (inputs, _) in enumerate(feed):
            assert inputs is work.batches[place % len(work.batches)][0]
            seen.append((name, place))
        return [0.0]

    return train


def sleeping(set_up_s: float, ahead: int) -> Train:
    """Sleeps for every batch, reading `ahead` batches ahead."""

    def look_ahead(feed: Feed) -> Iterator[object]:
        waiting: list[object] = []
        for batch in feed:
            waiting.append(batch)
            if len(waiting) > ahead:
                yield waiting.pop(0)
        yield from waiting

    def train(model: nn.Module, feed: Feed, work: Work) -> list[float]:
        time.sleep(set_up_s)
        for _ in look_ahead(feed):
            time.sleep(SLEEP_S)
        return [0.0]

    return train


def row(contender: str = "x", ratio: float = 1.0, bound: float | None = None) -> Row:
    return Row(
        case="work", contender=contender, median=2.0, unit="s", ratio=ratio, spread=0.1, wall_ratio=1.0, bound=bound
    )


def test_contenders_take_turns_of_whole_chunks_in_rotated_order_and_get_every_batch() -> None:
    seen: list[tuple[str, int]] = []
    interleave({"a": counting(seen, "a"), "b": counting(seen, "b")}, mlp(), chunk_updates=3, rounds=4)
    whole = seen[: 2 * 3 * 6]  # two rounds of them are not timed
    assert [{name for name, _ in whole[at : at + 3]} for at in range(0, 36, 3)] == [{name} for name in "abababbaabba"]
    assert all([place for name, place in seen if name == one] == [*range(18 + TAIL_UPDATES)] for one in "ab")


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_chunk_is_timed_without_set_up_and_whatever_is_read_ahead(ahead: int) -> None:
    began = time.perf_counter()
    times = interleave({"sleeper": sleeping(0.3, ahead)}, mlp(), chunk_updates=5, rounds=4)["sleeper"]
    took_s = time.perf_counter() - began
    assert len(times.wall_s) == len(times.cpu_s) == 4
    assert min(times.wall_s) >= 5 * SLEEP_S
    assert sum(times.wall_s) <= took_s - 0.3  # the set-up
    assert min(times.cpu_s) < min(times.wall_s)


def test_the_plain_loops_and_evenstep_come_to_the_same_parameters() -> None:
    contenders = {"tuned": train_tuned, "ordinary": train_ordinary, "evenstep": train_evenstep}
    times = interleave(contenders, mlp(num_microbatches=2), chunk_updates=20, rounds=2)
    assert {name: len(one.cpu_s) for name, one in times.items()} == {"tuned": 2, "ordinary": 2, "evenstep": 2}


def lazy(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    return [0.0 for _ in feed]


def silent(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    train_tuned(model, feed, work)
    return []


def diverged(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    train_tuned(model, feed, work)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    return [math.nan]


def persistent(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    """Begins another epoch when the data end."""
    while [0.0 for _ in feed]:
        pass
    return [0.0]


def early(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    next(iter(feed))
    return [0.0]


def broken(model: nn.Module, feed: Feed, work: Work) -> list[float]:
    next(iter(feed))
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize(
    ("contender", "error", "message"),
    [
        (lazy, RuntimeError, "lazy did other work than tuned"),
        (diverged, RuntimeError, "diverged did other work than tuned"),
        (silent, RuntimeError, "silent must record the loss"),
        (early, RuntimeError, "early ended after 0 chunks"),
        (broken, ZeroDivisionError, "broken"),
    ],
)
def test_a_contender_that_does_not_do_the_work_is_an_error_and_leaves_no_thread(
    contender: Train, error: type[Exception], message: str
) -> None:
    before = threading.active_count()
    contenders = {"tuned": train_tuned, contender.__name__: contender}
    with pytest.raises(error, match=message):
        interleave(contenders, mlp(), chunk_updates=50, rounds=1)
    assert threading.active_count() == before


def test_a_chunk_takes_at_least_the_time_asked_for() -> None:
    def busy(model: nn.Module, feed: Feed, work: Work) -> list[float]:
        for _ in feed:
            until = time.process_time() + SLEEP_S
            while time.process_time() < until:
                pass
        return [0.0]

    updates = chunk_of(busy, mlp(), seconds=0.03, multiple=5)
    assert updates in (10, 15)


def test_the_ratio_is_the_median_over_rounds_of_the_ratios_within_a_round() -> None:
    # Everything took ten times as long in the second round, which must not show.
    contender, reference = Times([2.0, 20.0, 3.0, 3.0], [4.0] * 4), Times([1.0, 10.0, 1.0, 1.0], [1.0] * 4)
    made = compared("work", "x", contender, reference, unit="ms", per_s=1e3, bound=2.4)
    assert (made.ratio, made.spread, made.wall_ratio, made.median, made.ok) == (2.5, 1.0, 4.0, 3000.0, False)


def test_rows_are_written_with_whether_their_bound_holds_and_read_back(tmp_path: Path) -> None:
    rows = [row("a"), row("b", 1.2, 1.1), row("c", 1.1, 1.1)]
    write_rows(tmp_path / "new" / "rows.json", rows)
    written = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert [one["ok"] for one in written] == [None, False, True]
    assert {"case", "contender", "median", "unit", "ratio", "bound", "ok"} <= set(written[0])
    assert read_rows(tmp_path / "new" / "rows.json") == rows
    assert [line.split()[-1] for line in table(rows).splitlines()[2:]] == ["NO", "yes"]


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], str]:
    """Makes a benchmark that gives one row of this ratio."""

    def make(ratio: float) -> str:
        name = f"benchmark_of_{round(100 * ratio)}"
        code = f"from harness.row import Row\n\n\ndef main():\n    return [{row(ratio=ratio, bound=1.0)!r}]\n"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return make


def test_a_bound_that_fails_makes_the_exit_code_1(
    benchmark: Callable[[float], str], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = benchmark(0.9), benchmark(1.5)
    assert run.run([good]) == 0
    assert run.run([bad, good]) == 1
    assert capsys.readouterr().err == f"FAILED {bad}: work: x 1.500 ×, bound 1.000\n"
