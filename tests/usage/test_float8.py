"""A user trains linear layers in float8 on several ranks: with every strategy, in stages, resumed elsewhere."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import float8_programs as programs
import pytest
from launched import Failed, on_ranks
from tiny_recipe import PARTS, RUN

from evenstep.cli import main

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra `float8` is not installed")

SAME = ("model", "optimizer", "ema", "valid", "saved as")
RECIPES = ("tensorwise", "rowwise_with_gw_hp")


def on(ranks: int, *ways: dict[str, Any]) -> list[dict[str, Any]]:
    """What the first rank has of each way."""
    results = on_ranks(ranks, programs.run_each, list(ways), timeout_s=300)
    assert not [one for one in results if isinstance(one, Failed)], results
    return results[0]


@pytest.mark.parametrize("recipe", ["rowwise", *(pytest.param(one, marks=pytest.mark.slow) for one in RECIPES)])
def test_ordered_sums_have_the_bits_of_one_process_with_every_strategy_and_in_stages(recipe: str) -> None:
    layouts: list[dict[str, Any]] = [
        {"strategy": "ordered"},
        {"strategy": "ordered-zero1"},
        {"strategy": "ordered-fsdp"},
        {"pipeline": 2},
        {"pipeline": 2, "schedule": "zb_h1"},
    ]
    alone = programs.train(recipe=recipe)
    for layout, one in zip(layouts, on(2, *({"recipe": recipe, **layout} for layout in layouts)), strict=True):
        assert one["converted"], layout
        assert [part for part in SAME if one[part] != alone[part]] == [], layout


def test_a_run_is_stopped_and_resumed_on_other_layouts_with_the_same_bits(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    programs.train(folder=folder, until=1)
    on(2, {"strategy": "ordered-fsdp", "folder": folder, "until": 2}, {"pipeline": 2, "folder": folder, "until": 3})
    resumed, alone = programs.train(folder=folder), programs.train()
    assert [part for part in SAME if resumed[part] != alone[part]] == []
    assert resumed["saved as"] == ["torch.float32"]


WIDE = """
import torch
from torch import nn

def wide():
    block = lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return nn.Sequential(nn.Linear(2, 16), block(), block(), nn.Linear(16, 1))
"""


def test_a_run_file_trains_in_float8_and_check_says_which_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "parts.py").write_text(PARTS + WIDE)
    settings = ["--model.target", "parts.py:wide", "--train.precision", "float8-mixed"]
    settings += ["--train.precision", '{kind = "float8-mixed", emulate = true, recipe = "tensorwise"}']
    assert main(["check", "run.toml", *settings]) == 0
    said = capsys.readouterr()
    assert "float8      4 modules, 1.0, 1.2, 2.0, 2.2\n" in said.out
    assert not said.err
    assert main(["train", "run.toml", *settings]) == 0
    assert main(["train", "run.toml", *settings, "--resume", "auto", "--train.precision.recipe", "rowwise"]) == 1
    assert "`precision.recipe` was tensorwise and is now rowwise" in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_blocks_have_the_bits_of_one_compiled_process_on_ranks_and_in_stages() -> None:
    [alone] = on(1, {"compile": "model"})
    ways: list[dict[str, Any]] = [{"strategy": "ordered-zero1"}, {"pipeline": 2}]
    for way, one in zip(ways, on(2, *({"compile": "model", **way} for way in ways)), strict=True):
        assert [part for part in SAME if one[part] != alone[part]] == [], way
