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


def test_differences_are_told_tensor_by_tensor(evenstep: Run, tmp_path: Path) -> None:
    one = {"model": {"same": torch.ones(4), "moved": torch.tensor([3.0, 4.0]), "gone": torch.ones(1)}, "lr": 0.1}
    other = {"model": {"same": torch.ones(4), "moved": torch.tensor([3.0, 4.5]), "wide": torch.ones(1)}, "lr": 0.2}
    a, b = (write_checkpoint(tmp_path / name / "checkpoints", 5, s) for name, s in (("a", one), ("b", other)))
    done = evenstep("inspect", str(a), "--diff", str(b), "--verify")
    assert done.code == 1
    assert "model/moved: 1 of 2 elements differ, by at most 0.5; |a - b| / |a| = 0.1\n" in done.out
    assert "model/gone: only in a" in done.out
    assert "model/wide: only in b" in done.out
    assert "lr: 0.1 in a, 0.2 in b" in done.out
    assert "same" not in done.out
    same = evenstep("inspect", str(a), f"--diff={a}")
    assert (same.code, "no difference in 3 tensors" in same.out) == (0, True)
