from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from evenstep.cli.tools import shapes_of, table_of

Run = Callable[..., Any]


def test_each_module_is_there_with_its_shape_and_parameters(evenstep: Run, recipe: Path) -> None:
    done = evenstep("summary", "run.toml", "--model.args", "{width = 4}")
    assert done.code == 0, done.err
    assert [line.split() for line in done.out.splitlines()[:6]] == [
        ["module", "class", "gives", "parameters", "trained"],
        ["Net", "3×1", "17", "17"],
        ["layers", "Sequential", "3×1", "17", "17"],
        ["0", "Linear", "3×4", "12", "12"],
        ["1", "ReLU", "3×4"],
        ["2", "Dropout", "3×4"],
    ]
    assert "of a micro-batch of 3 samples; nothing was written" in done.out
    assert not (recipe / "runs").exists()
    shallow = evenstep("summary", "run.toml", "--depth", "1").out.splitlines()
    assert len(shallow) == 3 + 2


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_the_screen_and_frozen_parameters_are_told_apart(columns: int) -> None:
    deep = nn.Sequential()
    deep.add_module("a_rather_long_name_of_a_block_that_somebody_has_chosen", nn.Sequential(nn.LSTM(64, 128)))
    deep.add_module("head", nn.Linear(128, 1_000_000))
    deep[1].bias.requires_grad_(False)

    shapes = {"": "8×1000000", "head": "8×1000000"}
    console = Console(width=columns)
    with console.capture() as drawn:
        console.print(table_of(deep, shapes, 3))
    lines = drawn.get().splitlines()
    assert max(map(len, lines)) <= columns
    head = next(line.split() for line in lines if line.startswith("head"))
    assert head[-2:] == ["129,000,000", "128,000,000"]
    lstm = nn.LSTM(4, 5)
    assert shapes_of(lstm, torch.zeros(7, 2, 4)) == {"": "7×2×5, 1×2×5, 1×2×5"}
    assert lstm.training
