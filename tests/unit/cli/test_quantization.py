"""Quantisation in a run file: the model is prepared before the optimizer; checked, trained, resumed and exported."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.checkpoint import read_checkpoint

Run = Callable[..., Any]

PRODUCT = """
[[hooks]]
target = "evenstep.extras.quantization:ProductQuantization"
args.groups = [
    { layers = ["layers.0"], after_update = 2, block_size = 2, num_centroids = 2 },
    { layers = ["layers.3"], after_update = 4, block_size = 2, num_centroids = 2 },
]
"""
AWARE = """
[[hooks]]
target = "evenstep.extras.quantization:QuantizationAware"
args = { config = "IntxWeightOnlyConfig", options = { weight_dtype = "int4", granularity = 2 }, after_update = 2 }
"""
NOISE = """
[[hooks]]
target = "evenstep.extras.quantization:QuantizationNoise"
args = { layers = ["layers.0"], p = 0.3, block_size = 2 }
"""


def state_of(run: Path) -> Any:
    return read_checkpoint(run).state


@pytest.mark.parametrize("hooks", [PRODUCT, AWARE, PRODUCT + NOISE])
def test_it_is_checked_trained_and_resumed_to_the_bit(hooks: str, evenstep: Run, recipe: Path) -> None:
    if hooks is AWARE:
        pytest.importorskip("torchao", reason="the extra `quantization` is not installed")
    path = recipe / "run.toml"
    path.write_text(path.read_text() + hooks)
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


def test_a_strategy_that_it_is_not_for_is_refused_by_check(evenstep: Run, recipe: Path) -> None:
    path = recipe / "run.toml"
    path.write_text(path.read_text() + PRODUCT)
    refused = evenstep("check", "run.toml", "--train.compile", "model")
    assert refused.code == 1
    assert "ProductQuantizedLinear, which is another layer from a set update on" in re.sub(r"\s+", " ", refused.err)


def test_weights_of_before_and_after_a_layer_was_quantised_have_no_mean(evenstep: Run, recipe: Path) -> None:
    path = recipe / "run.toml"
    path.write_text(path.read_text() + PRODUCT)
    assert evenstep("train", "run.toml").code == 0
    refused = evenstep("average", "runs/tiny", "--last", "3")
    assert refused.code == 1 and "`layers.3.assignments` differs between the checkpoints" in refused.err
    assert evenstep("average", "runs/tiny", "--last", "2").code == 0


def test_the_exported_weights_are_those_of_the_codebooks(evenstep: Run, recipe: Path) -> None:
    from safetensors.torch import load_file

    path = recipe / "run.toml"
    path.write_text(path.read_text() + PRODUCT)
    assert evenstep("train", "run.toml").code == 0
    assert evenstep("export", "runs/tiny", "--to", "model.safetensors").code == 0
    state = load_file(recipe / "model.safetensors")
    built = state["layers.0.centroids"][state["layers.0.assignments"].long()]
    assert torch.equal(built.view_as(state["layers.0.weight"]), state["layers.0.weight"])
