from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenstep.checkpoint import write_checkpoint

Run = Callable[..., Any]


def test_a_checkpoint_is_verified_and_its_parts_are_listed(evenstep: Run, tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(3, 2)}, "progress": {"update": 5}}
    write_checkpoint(tmp_path / "checkpoints", 5, state)
    done = evenstep("inspect", str(tmp_path))
    assert done.code == 0
    assert "step-00000005: update 5, whole and undamaged" in done.out
    assert "model            1 tensors, 6 elements, 24 B, float32" in done.out
    assert "progress         {'update': 5}" in done.out


def test_a_damaged_checkpoint_is_an_error(evenstep: Run, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoints", 5, {"model": {"weight": torch.zeros(3, 2)}})
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    done = evenstep("inspect", str(path))
    assert done.code == 1
    assert "is damaged" in done.err


def test_a_report_is_written_again(evenstep: Run, recipe: Path) -> None:
    assert evenstep("train", "run.toml").code == 0
    (recipe / "runs" / "tiny" / "report.html").unlink()
    done = evenstep("report", "runs/tiny")
    assert (done.code, done.out) == (0, "runs/tiny/report.html\n")
    assert (recipe / "runs" / "tiny" / "report.html").is_file()
