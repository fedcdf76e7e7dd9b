from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.pipeline import PipelineModel
from evenstep.train.blocks import choose_modules
from refused import refused


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


class Own(nn.Module):
    """A block of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def within(**parts: nn.Module) -> nn.Module:
    """As in `transformers`: a dict of parts, one of which is the list of blocks."""
    return nn.ModuleDict({"transformer": nn.ModuleDict(parts)})


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (within(wte=nn.Linear(2, 2), h=nn.ModuleList([block(), block()])), ("transformer.h.0", "transformer.h.1")),
        (nn.Sequential(nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)), ("1", "2")),
        (nn.Sequential(mlp(), nn.ModuleList([Own(), nn.Linear(2, 2), Own()])), ("1.0", "1.2")),  # one of each class
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 2), ("layers.0", "layers.1")),
        (nn.ModuleList([nn.ModuleList([block(), block()]) for _ in range(2)]), ("0.0", "0.1", "1.0", "1.1")),
    ],
)
def test_blocks_are_what_is_repeated_in_lists_and_more_than_a_layer(model: nn.Module, names: tuple[str, ...]) -> None:
    chosen = choose_modules(model, "blocks")
    assert chosen.names == names == tuple(chosen.here)
    assert all(chosen.here[name] is model.get_submodule(name) for name in names)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("h.*", ("h.0", "h.1")),  # and nothing of what is inside of them
        ("h.?.0", ("h.0.0", "h.1.0")),
        ("*", ("wte", "h.0", "h.1")),  # the list itself is called by nobody
        ("wte", ("wte",)),
    ],
)
def test_a_pattern_means_the_outermost_modules_that_are_called(pattern: str, names: tuple[str, ...]) -> None:
    model = nn.ModuleDict({"wte": nn.Linear(2, 2), "h": nn.ModuleList([block(), block()])})
    assert choose_modules(model, pattern).names == names


@pytest.mark.parametrize(
    ("pattern", "field"),
    [("g.*", "memory.checkpoint"), ("h", "memory.checkpoint")],
)
def test_a_pattern_that_fits_nothing_is_refused_with_what_there_is(pattern: str, field: str) -> None:
    with refused(ArgumentError, field):
        choose_modules(nn.ModuleDict({"h": nn.ModuleList([block(), block()])}), pattern)


def test_the_blocks_of_a_model_in_stages_are_among_its_layers() -> None:
    model = PipelineModel([nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)], stages_per_rank=2)
    assert choose_modules(model, "blocks").names == ("1", "2")
    assert choose_modules(model, "[03]").names == ("0", "3")
    opened = PipelineModel(nn.Sequential(block(), block()), stages_per_rank=2)
    with refused(ArgumentError, "memory.checkpoint"):
        choose_modules(opened, "blocks")
