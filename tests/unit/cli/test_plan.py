import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep.pipeline import SCHEDULES
from evenstep.tools.planning.text import read_plans

Run = Callable[..., Any]
SIZE = ("--ranks", "4", "--microbatches", "8")


def rows(out: str) -> dict[str, list[str]]:
    """The table's cells, by schedule."""
    lines = [line.lstrip("*! ").split() for line in out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells and cells[0] in SCHEDULES and len(cells) > 4}


def test_all_schedules_are_compared(evenstep: Run) -> None:
    done = evenstep("plan", *SIZE)
    assert done.code == 0, done.err
    table = rows(done.out)
    assert list(table) == list(SCHEDULES)
    assert table["1f1b"] == ["4", "33", "ms", "27.3%", "4", "-"]
    assert table["zb_v"] == ["8", "25.5", "ms", "5.9%", "4", "-"]
    assert "* the fastest: zb_v" in done.out


@pytest.mark.parametrize("form", ["json", "txt"])
def test_a_schedule_is_written_as_the_files_suffix_says(evenstep: Run, recipe: Path, form: str) -> None:
    done = evenstep("plan", *SIZE, "--schedule", "zb_h1", "--out", f"new/plan.{form}")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"new/plan.{form}"
    text = (recipe / f"new/plan.{form}").read_text()
    layout = SCHEDULES["zb_h1"].layout(4)
    order = SCHEDULES["zb_h1"].order(layout, range(8))
    if form == "json":
        assert len(json.loads(text)["traceEvents"]) == 4 + 4 * 8 * 3
    else:
        assert read_plans(text) == order


def test_a_schedule_written_by_hand_joins_the_table(evenstep: Run, recipe: Path) -> None:
    (recipe / "mine.txt").write_text("0F0 0F1 0B0 0B1  # all forwards\n1F0 1F1 1B0 1B1\n")
    done = evenstep("plan", "--ranks", "2", "--microbatches", "2", "--schedule", "mine.txt")
    assert done.code == 0, done.err
    assert "mine.txt: 9 ms" in done.out
    other = evenstep("plan", "--ranks", "2", "--microbatches", "3", "--schedule", "mine.txt")
    assert other.code == 1 and "`--schedule`" in other.err


CHAIN = "from torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))\n"


def test_the_layers_of_a_run_are_measured_and_cut(evenstep: Run, recipe: Path) -> None:
    (recipe / "chain.py").write_text(CHAIN)
    chain = ["--model.target", "chain.py:model"]
    done = evenstep("plan", "run.toml", *chain, "--parallel.pipeline", "2", "--schedule", "1f1b")
    assert done.code == 0, done.err
    assert "2 ranks, 3 micro-batches" in done.out  # 8 samples in micro-batches of 3
    assert "parallel.split_at = [" in done.out
    assert "MiB" in rows(done.out)["1f1b"] and "zb_v is left out" in done.out  # 3 layers, 4 stages
    assert not (recipe / "runs").exists()


def test_the_best_schedule_fits_into_the_memory_of_a_rank(evenstep: Run, recipe: Path) -> None:
    (recipe / "chain.py").write_text(CHAIN)
    chain = ["run.toml", "--model.target", "chain.py:model", "--ranks", "2"]
    done = evenstep("plan", *chain, "--memory-gib", "1")
    assert done.code == 0 and "* the fastest within the cap" in done.out, done.err
    small = evenstep("plan", *chain, "--memory-gib", "1e-9")
    assert small.code == 1 and "`--memory-gib`" in small.err and "! gpipe" in small.out
