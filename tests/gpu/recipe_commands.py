"""The command line on a small recipe, on whatever device it is given."""

import os
import subprocess
import sys
from pathlib import Path

import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_bytes"
MODEL = {"layers": 1, "width": 32, "heads": 2}
SMALL = [f"--model.args.{name}={value}" for name, value in MODEL.items()] + ["--lr_schedule.warmup_updates=2"]
SMALLER = [f"--{key}.args.context=16" for key in ("model", "data.train", "data.evaluations.valid")]
UPDATES = 60


def begun(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    )


def of_recipe(device: torch.device, command: str, *settings: str) -> "subprocess.Popen[str]":
    run = [str(RECIPE / "run.toml"), "--device", device.type]
    return begun(command, *run, *SMALL, *SMALLER, *settings)


def said(process: "subprocess.Popen[str]", code: int = 0) -> str:
    output, _ = process.communicate(timeout=85)
    assert process.returncode == code, output[-3000:]
    return output
