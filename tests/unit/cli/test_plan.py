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
    return {cells[0]: cells[1:] for cells in lines if cells and cells[0] in SCHEDULES and len(cells) > 5}


def test_all_schedules_are_compared_and_the_fastest_is_drawn(evenstep: Run) -> None:
    done = evenstep("plan", *SIZE, "--activation-mib", "100", "--message-mib", "3", "--width", "60")
    assert done.code == 0, done.err
    table = rows(done.out)
    assert list(table) == list(SCHEDULES)
    assert table["1f1b"] == ["4", "33", "ms", "27.3%", "4", "400", "MiB", "48", "MiB"]
    assert table["zb_v"] == ["8", "25.5", "ms", "5.9%", "4", "400", "MiB", "96", "MiB"]
    assert "* the fastest: zb_v" in done.out
    assert "sent from rank to rank: 0>1 48 MiB, 1>0 48 MiB, 1>2 48 MiB" in done.out
    assert "zb_v: 4 ranks, 8 micro-batches, 25.5 ms from left to right" in done.out
    assert [len(line) for line in done.out.splitlines() if line.startswith("rank ")] == [9 + 60] * 4


def test_the_best_is_within_the_cap(evenstep: Run) -> None:
    done = evenstep("plan", *SIZE, "--activation-mib", "100", "--memory-gib", "0.4")
    assert "* the fastest within the cap: zb_v" in done.out
    assert "! gpipe" in done.out
    none = evenstep("plan", *SIZE, "--activation-mib", "100", "--memory-gib", "0.01")
    assert none.code == 1
    assert "no pipeline schedule stays within the 0.01 GiB of `--memory-gib`; the least that one needs is" in none.err


def test_costs_come_from_a_file_and_the_command_line_is_stronger(evenstep: Run, recipe: Path) -> None:
    (recipe / "costs.toml").write_text("forward_ms = 10\ninput_backward_ms = 10\nweight_backward_ms = 10\n")
    assert rows(evenstep("plan", *SIZE, "--costs", "costs.toml").out)["1f1b"][1:3] == ["330", "ms"]
    stronger = evenstep("plan", *SIZE, "--costs", "costs.toml", "--forward-ms", "0")
    assert rows(stronger.out)["1f1b"][1:3] == ["220", "ms"]


def test_layers_of_a_file_are_cut_into_balanced_stages(evenstep: Run, recipe: Path) -> None:
    seconds = {"embedding": 1, "first": 2, "second": 3, "third": 3, "head": 3}
    (recipe / "costs.toml").write_text(
        "".join(f'[[layers]]\nname = "{name}"\nforward_ms = {time}\n' for name, time in seconds.items())
    )
    done = evenstep("plan", "--ranks", "2", "--microbatches", "4", "--costs", "costs.toml", "--schedule", "1f1b")
    assert done.code == 0, done.err
    assert "the most balanced 2 stages: 6 ms, 6 ms per micro-batch" in done.out
    assert 'parallel.split_at = ["third"]' in done.out
    few = evenstep("plan", "--ranks", "4", "--microbatches", "4", "--costs", "costs.toml", "--schedule", "1f1b")
    assert "zb_v is left out: 5 layers can't be cut into 8 stages" in few.out


@pytest.mark.parametrize("form", ["trace", "plan", "torch", "text"])
def test_pictures_go_into_files(evenstep: Run, recipe: Path, form: str) -> None:
    done = evenstep("plan", *SIZE, "--schedule", "zb_h1", "--draw", form, "--out", "new/picture")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "new/picture"
    text = (recipe / "new/picture").read_text()
    layout = SCHEDULES["zb_h1"].layout(4)
    order = SCHEDULES["zb_h1"].order(layout, range(8))
    if form == "trace":
        assert len(json.loads(text)["traceEvents"]) == 4 + 4 * 8 * 3
    elif form == "plan":
        assert read_plans(text) == order
    elif form == "torch":
        assert text.splitlines()[0] == ",".join(map(str, order[0]))
    else:
        assert len(text.splitlines()) == 4


def test_a_schedule_written_by_hand_joins_the_table(evenstep: Run, recipe: Path) -> None:
    (recipe / "mine.txt").write_text("0F0 0F1 0B0 0B1  # all forwards\n1F0 1F1 1B0 1B1\n")
    done = evenstep("plan", "--ranks", "2", "--microbatches", "2", "--schedule", "mine.txt", "--width", "36")
    assert done.code == 0, done.err
    assert "mine.txt: 2 ranks, 2 micro-batches, 9 ms from left to right" in done.out
    other = evenstep("plan", "--ranks", "2", "--microbatches", "3", "--schedule", "mine.txt")
    assert other.code == 1
    assert "mine.txt cannot be used here" in other.err
    assert "written for 2 micro-batches, but there are 3" in other.err


def test_the_layers_of_a_run_are_measured(evenstep: Run, recipe: Path) -> None:
    (recipe / "chain.py").write_text(
        "from torch import nn\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))\n"
    )
    chain = ["--model.target", "chain.py:model"]
    done = evenstep("plan", "run.toml", *chain, "--parallel.pipeline", "2", "--schedule", "1f1b")
    assert done.code == 0, done.err
    assert "2 ranks, 3 micro-batches" in done.out  # 8 samples in micro-batches of 3
    assert "parallel.split_at = [" in done.out
    assert not (recipe / "runs").exists()
    whole = evenstep("plan", "run.toml", "--ranks", "2")
    assert whole.code == 1
    assert "Net can't be cut into stages" in whole.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "2 faults"),
        (["--ranks", "4"], "`--microbatches` is missing; give it."),
        ([*SIZE, "--rank", "4"], "`--rank` is not an option of `evenstep plan`; did you mean `--ranks`?"),
        (["--ranks", "0", "--microbatches", "8"], "`--ranks` must be a whole number of at least 1, but is 0."),
        (["--ranks", "two", "--microbatches", "8"], "`--ranks` must be a whole number, but is two."),
        ([*SIZE, "--memory-gib", "-1"], "`--memory-gib` must be a number of at least 0, but is -1."),
        ([*SIZE, "--schedule", "1f1d"], "neither a pipeline schedule nor a file; did you mean `1f1b`?"),
        ([*SIZE, "--draw", "svg"], "`--draw`"),
        ([*SIZE, "--costs", "none.toml"], "there is no file none.toml"),
        ([*SIZE, "--train.updates", "3"], "`--train.updates` sets a key of a run file, but none is given"),
        ([*SIZE, "--draw", "trace"], "`--draw trace`"),
        ([*SIZE, "--costs", "layers.toml", "--forward-ms", "3"], "`--forward-ms` can't be given with the costs of la"),
        ([*SIZE, "--width"], "`--width` has no value"),
        ([*SIZE, "--verify"], "`--verify` is not an option of `evenstep plan`"),
        (["run.toml", *SIZE, "--costs", "costs.toml"], "`--costs` can't be given with a run file"),
        ([*SIZE, "--costs", "costs.toml"], "`forward_s` in costs.toml is not a cost; did you mean `forward_ms`?"),
        ([*SIZE, "--schedule", "bad.txt"], "`--schedule` names the file bad.txt"),
    ],
)
def test_what_cannot_be_is_said(evenstep: Run, recipe: Path, arguments: list[str], says: str) -> None:
    (recipe / "costs.toml").write_text("forward_s = 3\n")
    (recipe / "layers.toml").write_text("[[layers]]\nforward_ms = 3\n")
    (recipe / "bad.txt").write_text("0F0\n0F1 0Q0\n")
    done = evenstep("plan", *arguments)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
