"""Quantisation-aware training in a run file: the model is prepared before the optimizer; checked, trained, resumed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]

HOOK = """
[[hooks]]
target = "evenstep.contrib.qat:QuantizationAware"
args = { config = "IntxWeightOnlyConfig", options = { weight_dtype = "int4", granularity = 2 }, after_update = 2 }
"""


def state_of(run: Path) -> Any:
    return read_checkpoint(run).state


def test_a_run_file_is_checked_trained_and_resumed_to_the_bit(evenstep: Run, recipe: Path) -> None:
    pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    path = recipe / "run.toml"
    path.write_text(path.read_text() + HOOK)
    checked = evenstep("check", "run.toml")
    assert checked.code == 0, checked.err
    assert evenstep("train", "run.toml").code == 0
    whole = state_of(recipe / "runs" / "tiny")["model"]
    for kept in (2, 4):
        assert evenstep("train", "run.toml", "--name", f"cut{kept}").code == 0
        for step in range(kept + 2, 8, 2):
            shutil.rmtree(recipe / "runs" / f"cut{kept}" / "checkpoints" / f"step-0000000{step}")
        assert evenstep("resume", f"runs/cut{kept}").code == 0
        again = state_of(recipe / "runs" / f"cut{kept}")["model"]
        assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
