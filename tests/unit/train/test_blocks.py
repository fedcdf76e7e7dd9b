"""Choice of the modules whose activations are computed again."""

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


def blocks() -> nn.ModuleList:
    return nn.ModuleList([block(), block()])


class Own(nn.Module):
    """A block of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def within(**parts: nn.Module) -> nn.Module:
    """As in `transformers`: a dict of parts, one of which is the list of blocks."""
    return nn.ModuleDict({"transformer": nn.ModuleDict(parts)})


ENCODER_LAYER = nn.TransformerEncoderLayer(4, 2, batch_first=True)
EMBEDDED = nn.ModuleDict({"wte": nn.Linear(2, 2), "h": blocks()})


@pytest.mark.parametrize(
    ("model", "pattern", "names"),
    [
        (within(wte=nn.Linear(2, 2), h=blocks()), "blocks", ("transformer.h.0", "transformer.h.1")),
        (nn.Sequential(nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)), "blocks", ("1", "2")),
        (nn.Sequential(block(), nn.ModuleList([Own(), nn.Linear(2, 2), Own()])), "blocks", ("1.0", "1.2")),
        (
            nn.TransformerEncoder(ENCODER_LAYER, 2),
            "blocks",
            ("layers.0", "layers.1"),
        ),
        (nn.ModuleList([blocks(), blocks()]), "blocks", ("0.0", "0.1", "1.0", "1.1")),
        (EMBEDDED, "h.*", ("h.0", "h.1")),  # and nothing inside of them
        (EMBEDDED, "h.?.0", ("h.0.0", "h.1.0")),
        (EMBEDDED, "*", ("wte", "h.0", "h.1")),  # the list itself is called by nobody
        (EMBEDDED, "wte", ("wte",)),
        (PipelineModel([nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)], stages_per_rank=2), "blocks", ("1", "2")),
        (PipelineModel([nn.Linear(2, 2), Own(), Own(), nn.Linear(2, 1)], stages_per_rank=2), "[03]", ("0", "3")),
    ],
)
def test_blocks_and_patterns_choose_the_outermost_modules_that_are_called(
    model: nn.Module, pattern: str, names: tuple[str, ...]
) -> None:
    chosen = choose_modules(model, pattern)
    assert tuple(chosen) == names


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (nn.ModuleDict({"h": blocks()}), "g.*"),
        (nn.ModuleDict({"h": blocks()}), "h"),
        (PipelineModel(nn.Sequential(block(), block()), stages_per_rank=2), "blocks"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(model: nn.Module, pattern: str) -> None:
    with refused(ArgumentError, "memory.checkpoint"):
        choose_modules(model, pattern)
