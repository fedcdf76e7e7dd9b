"""Each start of a run is a line that says what can't be found out later."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.events import TrainEvent
from evenstep.events.hooks.status import git_state, write_start


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_each_start_adds_a_line_with_command_layout_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    for update, source in ((0, None), (20, "runs/a/checkpoints/step-00000020")):
        begin = TrainEvent(update=update, updates=40, resumed=source is not None)
        write_start(tmp_path / "run", begin, layout={"ranks": 2, "strategy": "Fsdp"}, resumed_from=source)
    first, second = map(json.loads, (tmp_path / "run" / "starts.jsonl").read_text().splitlines())
    assert (first["update"], first["resumed_from"], first["layout"]) == (0, None, {"ranks": 2, "strategy": "Fsdp"})
    assert (second["update"], second["resumed_from"]) == (20, "runs/a/checkpoints/step-00000020")
    assert first["command"] == ["train.py", "--lr", "0.1"]
    assert {"torch", "python", "evenstep", "cpu"} <= first["environment"].keys()


def test_the_state_of_the_source_is_commit_branch_and_number_of_changed_files(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    folder = tmp_path / "source" / "inner"
    folder.mkdir(parents=True)
    git(folder.parent, "init", "-q")
    (folder / "a.py").write_text("1")
    git(folder, "add", "a.py")
    git(folder, "commit", "-q", "-m", "one")
    (folder / "a.py").write_text("2")
    (folder / "untracked.py").write_text("3")
    commit = git(folder, "rev-parse", "HEAD").strip()
    assert git_state(folder) == {"commit": commit, "branch": "main", "changed_files": 1}
    (folder / "a.py").write_text("1")
    assert (git_state(folder) or {})["changed_files"] == 1  # of this process it is what was there at first


def test_without_git_nothing_is_said_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
