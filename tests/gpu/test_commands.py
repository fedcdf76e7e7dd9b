"""The command line on a device: a recipe is checked, trained, stopped and gone on with there."""

import signal
import time
from pathlib import Path

import pytest
import torch
from recipe_commands import UPDATES, begun, of_recipe, said
from work import sha256

from evenstep.checkpoint import read_checkpoint

pytestmark = pytest.mark.slow  # on a CPU, where other tests show it; `make gpu` runs them all the same


def ended(folder: Path) -> str:
    return sha256(read_checkpoint(folder).state["model"])


def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(device: torch.device, tmp_path: Path) -> None:
    settings = ["--runs", str(tmp_path), "--train.updates", str(UPDATES), "--train.precision", "bf16-mixed"]
    settings += ["--checkpoint.every_updates", "20", "--evaluation.every_updates", "30", "--log.every_updates", "5"]
    said(of_recipe(device, "check", *settings))
    said(of_recipe(device, "train", *settings, "--name", "whole", "--train.ema.decay", "0.9"))
    process = of_recipe(device, "train", *settings, "--name", "parts", "--train.ema.decay", "0.9")
    until = time.monotonic() + 60
    while not list(tmp_path.glob("parts/checkpoints/step*")):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (0, 130), output  # 0: it was done before the signal came
    said(begun("resume", str(tmp_path / "parts")))
    assert ended(tmp_path / "parts") == ended(tmp_path / "whole")
