"""Modules that FSDP2 gathers at once. The rest is in tests/ranks."""

from collections.abc import Callable

import pytest
from torch import nn

from evenstep.parallel.fsdp import units, with_forward


def nested() -> tuple[nn.Module, list[nn.Module]]:
    block = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    blocks = nn.ModuleList([block, nn.Linear(2, 2), nn.Tanh()])
    return nn.ModuleDict({"first": nn.Linear(2, 2), "blocks": blocks}), [blocks[0], blocks[1]]


def without_a_forward() -> tuple[nn.Module, list[nn.Module]]:
    pair = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.ModuleList([nn.Linear(2, 2)])})
    blocks = nn.ModuleList([pair, nn.Linear(2, 2)])
    return nn.ModuleDict({"blocks": blocks}), [pair["one"], pair["two"][0], blocks[1]]


def shared() -> tuple[nn.Module, list[nn.Module]]:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.ModuleDict({"blocks": layers, "out": nn.Linear(2, 2)})
    model["out"].weight = layers[0].weight
    return model, [layers[1]]


def sequential() -> tuple[nn.Module, list[nn.Module]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    return model, [model[0], model[2]]


@pytest.mark.parametrize("made", [nested, without_a_forward, shared, sequential, lambda: (nn.Linear(2, 2), [])])
def test_the_units_are_the_items_of_the_outermost_lists(made: Callable[[], tuple[nn.Module, list[nn.Module]]]) -> None:
    model, wanted = made()
    assert units(model) == wanted


def test_a_stage_is_gathered_layer_by_layer_wherever_its_layers_are_in_the_model() -> None:
    stage, blocks = nn.Module(), nn.Module()
    stage.add_module("blocks", blocks)
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    blocks.add_module("3", block)
    head = nn.Linear(2, 2)
    stage.add_module("head", head)
    assert list(with_forward(stage)) == [block, head]
