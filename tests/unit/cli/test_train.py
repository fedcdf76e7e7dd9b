"""Runs of a run file: what they leave in their folder, how they go on, and what is not changed in between."""

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import read_checkpoint
from evenstep.cli import main

Run = Callable[..., Any]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_says_what_it_does_and_its_folder_holds_all_that_there_is_to_know(evenstep: Run, recipe: Path) -> None:
    done = evenstep("train", "run.toml", "--seed", "7")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:4] == [
        "run folder  runs/tiny",
        "model       Net, 17 parameters, on cpu",
        "data        train 40 samples, valid 16 samples",
        "run         6 updates (1.2 epochs of 5 updates), precision 32-true, seed 7",
    ]
    assert lines[-2:] == ["run folder  runs/tiny", "report      runs/tiny/report.html"]
    folder = recipe / "runs" / "tiny"
    assert {path.name for path in folder.iterdir()} == {
        *("config.toml", "metrics.jsonl", "status.json", "report.html"),
        *("checkpoints", "recipe", "settings.json"),
    }
    saved = tomllib.loads((folder / "config.toml").read_text())
    assert (saved["seed"], saved["recipe"]) == (7, "recipe")
    assert (folder / "recipe" / "parts.py").read_text() == (recipe / "parts.py").read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    updates = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in updates if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    before = tree(recipe / "runs")
    assert evenstep("train", "run.toml", "--seed", "1").code == 1  # the folder is there, and stays as it is
    assert tree(recipe / "runs") == before


def test_the_run_outlives_its_reader(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["train", "run.toml"]) == 0
    assert read_checkpoint(recipe / "runs" / "tiny").update == 6


@pytest.mark.parametrize("code", [4, 0])
def test_a_run_whose_code_exits_has_failed_and_says_where_it_goes_on(evenstep: Run, recipe: Path, code: int) -> None:
    with (recipe / "parts.py").open("a") as parts:
        parts.write(
            "import sys\n"
            "class Leaves(Regress):\n"
            "    def loss(self, output, batch):\n"
            f"        if self.now.update == 4 and self.now.is_training: sys.exit({code})\n"
            "        return super().loss(output, batch)\n"
        )
    done = evenstep("train", "run.toml", "--task.target", "parts.py:Leaves")
    assert done.code == (code or 1)
    assert "`evenstep resume runs/tiny`" in done.err
    assert read_checkpoint(recipe / "runs" / "tiny").update == 3


def test_a_resumed_run_ends_with_the_same_parameters(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml").code == 0
    whole = read_checkpoint("runs/tiny").state["model"]
    for step in ("step-00000004", "step-00000006"):
        shutil.rmtree(recipe / "runs" / "tiny" / "checkpoints" / step)
    done = evenstep("resume", "runs/tiny")
    assert done.code == 0, done.err
    again = read_checkpoint("runs/tiny").state["model"]
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


RAISES = """
class Regress(Regress):
    def loss(self, output, batch):
        if torch.is_grad_enabled() and Regress.calls == 9:
            raise RuntimeError("a mistake")
        Regress.calls += torch.is_grad_enabled()
        return super().loss(output, batch)

Regress.calls = 0
"""


def test_a_failed_run_goes_on_when_its_recipe_is_mended_where_it_was_written(evenstep: Run, recipe: Path) -> None:
    good = (recipe / "parts.py").read_text()
    (recipe / "parts.py").write_text(good + RAISES)
    assert evenstep("train", "run.toml").code == 1
    (recipe / "parts.py").write_text(good)
    done = evenstep("resume", "runs/tiny", "--recipe", ".")
    assert done.code == 0, done.err
    assert f"recipe recipe -> {recipe}" in done.out
    assert (recipe / "runs" / "tiny" / "recipe" / "parts.py").read_text() == good


TWO_TASKS = """
name = "tiny"
device = "cpu"
model = { target = "parts.py:Still" }
[tasks.a]
target = "parts.py:Regress"
data = { global_batch_size = 8, micro_batch_size = 4, train = { target = "parts.py:pairs" } }
[tasks.b]
target = "parts.py:Regress"
data = { global_batch_size = 4, train = { target = "parts.py:pairs" } }
[train]
updates = 4
[optimizer]
name = "SGD"
lr = 0.01
"""


def test_only_what_no_update_depends_on_may_be_changed_when_a_run_goes_on(evenstep: Run, recipe: Path) -> None:
    (recipe / "run.toml").write_text(TWO_TASKS)
    assert evenstep("train", "run.toml").code == 0
    settings = ["--tasks.a.data.micro_batch_size", "2", "--train.updates", "6"]
    done = evenstep("resume", "runs/tiny", *settings)
    assert done.code == 0, done.err
    assert "tasks.a.data.micro_batch_size 4 -> 2" in done.out
    before = (recipe / "runs" / "tiny" / "config.toml").read_bytes()
    for wrong in (["--tasks.a.data.shuffle", "false"], ["--optimizer.lr", "1"], ["--name", "x"]):
        assert evenstep("resume", "runs/tiny", *wrong, "--train.updates", "9").code == 2
    assert (recipe / "runs" / "tiny" / "config.toml").read_bytes() == before


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_resume_with_another_rate_is_refused_unless_it_starts_there_and_says_so(command: str, evenstep: Run) -> None:
    assert evenstep("train", "run.toml").code == 0
    rate = ["--optimizer.lr", "0.5", "--train.updates", "7"]
    assert evenstep(command, "run.toml", "--resume", "auto", *rate).code == 1
    done = evenstep(command, "run.toml", "--name", "second", "--resume", "runs/tiny", *rate)
    assert done.code == 0, done.err
    assert command == "check" or "the optimizer's `lr` was 0.01 and is now 0.5" in done.out


def test_early_stop_best_and_an_average_may_be_added_and_dropped_and_it_is_said(evenstep: Run) -> None:
    assert evenstep("train", "run.toml", "--train.updates", "4").code == 0
    added = ["--hooks.early_stop.patience_evaluations", "3", "--train.ema.decay", "0.9"]
    more = evenstep("resume", "runs/tiny", "--train.updates", "5", *added, "--checkpoint.best.metric", "valid/loss")
    assert more.code == 0, more.err
    assert "changed     train.updates 4 -> 5, " in more.out
    assert "hook `Best` is new" in more.out and "hook `EarlyStop` is new" in more.out
    keys = ("hooks.early_stop", "checkpoint.best", "train.ema")
    dropped = evenstep("resume", "runs/tiny", "--train.updates", "6", *(f"--{key}=none" for key in keys))
    assert dropped.code == 0, dropped.err
    assert "hook `Best` is gone" in dropped.out and "the average of the parameters is dropped" in dropped.out


def test_a_process_among_some_that_may_be_lost_does_not_train_alone(
    evenstep: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"TORCHFT_LIGHTHOUSE": "http://a:1", "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert evenstep("train", "run.toml").code == 2
    assert not (recipe / "runs").exists()
