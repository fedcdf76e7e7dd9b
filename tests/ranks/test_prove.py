"""`evenstep prove` in processes of its own: ranks, stages, a run that is killed; Ctrl-C leaves none of them."""

import json
import signal
from pathlib import Path
from time import monotonic, sleep

import pytest
from scripts import Script
from squares import write_run

from evenstep.cli import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path, updates=12, more="parallel.timeout_s = 90")


def parents() -> dict[int, int]:
    """Who started each process that runs."""
    found: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if fields[0] != "Z":
            found[int(stat.parent.name)] = int(fields[1])
    return found


def started_by(number: int) -> set[int]:
    """The processes that one has started, and those that these have."""
    everybody = parents()
    found = {one for one, parent in everybody.items() if parent == number}
    return found.union(*(started_by(one) for one in found)) if found else found


def test_ranks_and_a_killed_run_end_at_the_bits_of_one_process(file: Path, tmp_path: Path) -> None:
    done = Script(
        "-m", "evenstep", "prove", file, "--rows", "kill,zero1", "--updates", 2, "--json", tmp_path / "proof.json"
    ).ended()
    assert done.code == 0, done
    rows = {row["row"]: row for row in json.loads((tmp_path / "proof.json").read_text())["rows"]}
    assert {name: row["holds"] for name, row in rows.items()} == {"kill": True, "ranks 2 zero1": True}, rows
    assert rows["kill"]["value"] == rows["kill"]["bound"] and len(rows["kill"]["value"]) == 64


NUMBERED = """
import os
import recipe
from torch import nn
class Numbered(nn.Module):
    def forward(self, x):
        return x * (1 + os.getpid() % 1000 / 1000)
def net():
    return nn.Sequential(recipe.model(), Numbered())
"""


def test_the_part_that_differs_by_process_is_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "numbered.py").write_text(NUMBERED)
    proof = tmp_path / "proof.json"
    asked = ("--model.target", "numbered.py:net", "--rows", "kill,ranks 2 ddp", "--updates", 2, "--json", proof)
    assert Script("-m", "evenstep", "prove", file, *asked).ended(240).code == 1
    assert ["module `1`" in row["causes"][0] for row in json.loads(proof.read_text())["rows"]] == [True, True]


def test_what_keeps_the_run_from_being_built_is_said_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(file), "--data.train.args.count", "-1"]) != 0
    said = capsys.readouterr()
    assert "row" not in said.out and len(said.err.splitlines()) == 1, said


HALTING = """
import os
import evenstep
from evenstep.errors import CheckpointError, MissingExtraError
class Halts(evenstep.Hook):
    first_rank_only = True
    def before_train(self, event):
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise CheckpointError("not on several ranks.")
class Lacks(evenstep.Hook):
    def before_train(self, event):
        raise MissingExtraError("nothing", "more")
"""


def test_a_row_that_only_one_rank_refuses_is_refused_without_a_wait(file: Path, tmp_path: Path) -> None:
    (tmp_path / "halting.py").write_text(HALTING)
    proof = tmp_path / "proof.json"
    hooks = ["--hooks", '[{ target = "halting.py:Halts" }]']
    command = Script("-m", "evenstep", "prove", file, "--rows", "zero1", *hooks, "--json", proof)
    assert command.ended().code == 0
    row = json.loads(proof.read_text())["rows"][0]
    assert (row["holds"], row["measure"]) == (None, "refused by name"), row
    assert "not on several ranks" in row["note"] and row["seconds"] < 90  # the time limit of a rank that waits


def test_an_extra_that_is_not_installed_ends_it_at_once(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "halting.py").write_text(HALTING)
    assert main(["prove", str(file), "--hooks", '[{ target = "halting.py:Lacks" }]']) == 1
    said = capsys.readouterr()
    assert "pip install 'evenstep[more]'" in said.err and "FAILS" not in said.out, said


def test_ctrl_c_ends_it_with_130_and_leaves_no_process(file: Path) -> None:
    slow = ["--task.args.slow_s", "0.1"]
    command = Script("-m", "evenstep", "prove", file, "--rows", "ddp", *slow)
    command.wait_for(lambda: len(started_by(command.pid)) >= 2)
    ranks = started_by(command.pid)
    command.send_signal(signal.SIGINT)
    assert command.ended().code == 130
    until = monotonic() + 5  # what starts ranks, and is told of the end by it, may be a moment behind
    while ranks & parents().keys() and monotonic() < until:
        sleep(0.05)
    assert not ranks & parents().keys()
