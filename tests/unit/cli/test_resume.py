import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]


def parameters(folder: Path) -> str:
    model: Any = read_checkpoint(folder).state["model"]
    digest = hashlib.sha256()
    for name in sorted(model):
        assert isinstance(model[name], torch.Tensor)
        digest.update(model[name].numpy().tobytes())
    return digest.hexdigest()


def test_a_resumed_run_ends_with_the_same_parameters(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml").code == 0
    # the same run, of which only the first checkpoint is left
    assert evenstep("train", "run.toml", "--name", "cut").code == 0
    for step in ("step-00000004", "step-00000006"):
        shutil.rmtree(recipe / "runs" / "cut" / "checkpoints" / step)
    done = evenstep("resume", "runs/cut")
    assert done.code == 0, done.err
    assert "runs/cut/checkpoints/step-00000002" in done.out
    assert parameters(recipe / "runs" / "cut") == parameters(recipe / "runs" / "tiny")


def test_a_setting_that_would_make_it_another_run_is_refused(evenstep: Run, recipe: Path) -> None:
    evenstep("train", "run.toml")
    before = (recipe / "runs" / "tiny" / "config.toml").read_bytes()
    done = evenstep("resume", "runs/tiny", "--optimizer.lr", "1", "--name", "x", "--train.updates", "9")
    assert done.code == 2
    assert done.err.startswith("evenstep: `name` and `optimizer.lr` can't be changed when a run goes on")
    assert (recipe / "runs" / "tiny" / "config.toml").read_bytes() == before


ADDED = ["--hooks.early_stop.patience_evaluations", "3", "--train.ema.decay", "0.9"]
BEST = ["--checkpoint.best.metric", "valid/loss"]


def test_early_stop_best_and_an_average_may_be_added_and_dropped_and_it_is_said(evenstep: Run) -> None:
    assert evenstep("train", "run.toml", "--train.updates", "4").code == 0
    added = evenstep("resume", "runs/tiny", "--train.updates", "5", *ADDED, *BEST)
    assert added.code == 0, added.err
    assert "changed     train.updates 4 -> 5, " in added.out
    assert (
        "hook `Best` is new and has no saved state; hook `EarlyStop` is new and has no saved state; the average"
        in added.out
    )
    dropped = evenstep(
        "resume",
        "runs/tiny",
        "--train.updates",
        "6",
        "--hooks.early_stop",
        "none",
        "--checkpoint.best",
        "none",
        "--train.ema",
        "none",
    )
    assert dropped.code == 0, dropped.err
    assert "hook `Best` is gone" in dropped.out
    assert "hook `EarlyStop` is gone" in dropped.out
    assert "the average of the parameters is dropped" in dropped.out
    assert "all 6 updates are done" in dropped.out


RAISES = """
class Regress(Regress):
    def loss(self, output, batch):
        if torch.is_grad_enabled() and Regress.calls == 9:
            raise RuntimeError("a mistake")
        Regress.calls += torch.is_grad_enabled()
        return super().loss(output, batch)

Regress.calls = 0
"""


def test_the_advice_of_a_failed_run_works_when_the_recipe_is_mended_where_it_was_written(
    evenstep: Run, recipe: Path
) -> None:
    good = (recipe / "parts.py").read_text()
    (recipe / "parts.py").write_text(good + RAISES)
    failed = evenstep("train", "run.toml")
    assert failed.code == 1
    assert f"`evenstep resume {Path('runs/tiny')}` continues there" in failed.err
    (recipe / "parts.py").write_text(good)
    again = evenstep("resume", "runs/tiny")  # as it was: says why it may fail again
    assert again.code == 0 or "a mistake" in again.err
    (recipe / "runs" / "tiny" / "checkpoints").rename(recipe / "runs" / "tiny" / "elsewhere")
    done = evenstep("resume", "runs/tiny", "--recipe", ".")
    assert done.code == 0, done.err
    assert f"recipe recipe -> {recipe}" in done.out
    assert (recipe / "runs" / "tiny" / "recipe" / "parts.py").read_text() == good


def test_where_to_begin_is_not_for_resume_to_say(evenstep: Run) -> None:
    assert evenstep("train", "run.toml").code == 0
    done = evenstep("resume", "runs/tiny", "--resume", "never")
    assert done.code == 2
    assert "`resume` can't be set for `evenstep resume`" in done.err


def test_what_no_update_depends_on_may_be_changed_in_a_run_of_several_tasks_too(evenstep: Run, recipe: Path) -> None:
    (recipe / "run.toml").write_text(TWO_TASKS)
    assert evenstep("train", "run.toml").code == 0
    settings = ["--tasks.a.data.micro_batch_size", "2", "--train.updates", "6", "--train.check_loss", "false"]
    done = evenstep("resume", "runs/tiny", *settings, "--mixture.mixing.kind", "all")  # as it is when it is left out
    assert done.code == 0, done.err
    assert "tasks.a.data.micro_batch_size 4 -> 2" in done.out and "train.check_loss True -> False" in done.out
    done = evenstep("resume", "runs/tiny", "--tasks.a.data.shuffle", "false")
    assert done.code == 2
    assert "`tasks.a.data.shuffle` can't be changed" in done.err


TWO_TASKS = """
name = "tiny"
device = "cpu"
[model]
target = "parts.py:Still"
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
