from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from evenstep.checkpoint import write_checkpoint

Run = Callable[..., Any]


def test_a_checkpoint_is_described_with_its_lineage(evenstep: Run, tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(3, 2)}, "progress": {"update": 5}}
    path = write_checkpoint(tmp_path / "checkpoints", 5, state, resumed_from="runs/old/checkpoints/step-00000003")
    done = evenstep("inspect", str(tmp_path))
    assert done.code == 0
    assert "step-00000005: update 5, complete; --verify reads every byte" in done.out
    assert "by 1 rank, evenstep" in done.out
    assert "resumed from runs/old/checkpoints/step-00000003" in done.out
    crc = crc32((path / "state.json").read_bytes())
    assert f"crc32 {crc:08x}" in done.out
    assert "model            1 tensor, 6 elements, 24 B, float32" in done.out
    assert "progress         {'update': 5}" in done.out


def test_only_verifying_finds_a_flipped_bit(evenstep: Run, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoints", 5, {"model": {"weight": torch.zeros(3, 2)}})
    assert "whole and undamaged" in evenstep("inspect", "--verify", str(path)).out
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert evenstep("inspect", str(path)).code == 0
    done = evenstep("inspect", str(path), "--verify")
    assert done.code == 1
    assert "is damaged" in done.err
