"""What FSDP2 gathers at once, and what is refused before anything is sharded. The rest is in tests/ranks."""

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from evenstep.errors import ArgumentError
from evenstep.parallel import Fsdp, Group
from evenstep.parallel.fsdp import layers, units
from refused import refused


class Ranks(Group):
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks


def test_the_items_of_the_outermost_lists_are_the_units() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "blocks": nn.ModuleList([block, nn.Linear(2, 2), nn.Tanh()])})
    assert units(model) == [model["blocks"][0], model["blocks"][1]]


def test_what_an_item_without_a_forward_holds_are_units() -> None:
    pair = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.ModuleList([nn.Linear(2, 2)])})
    model = nn.ModuleDict({"blocks": nn.ModuleList([pair, nn.Linear(2, 2)])})
    assert units(model) == [pair["one"], pair["two"][0], model["blocks"][1]]


def test_an_item_that_shares_a_parameter_with_another_part_is_no_unit() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.ModuleDict({"blocks": layers, "out": nn.Linear(2, 2)})
    model["out"].weight = layers[0].weight
    assert units(model) == [layers[1]]


def test_a_sequential_model_is_gathered_layer_by_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert units(model) == [model[0], model[2]]


def test_a_stage_is_gathered_layer_by_layer_wherever_its_layers_are_in_the_model() -> None:
    stage, blocks = nn.Module(), nn.Module()
    stage.add_module("blocks", blocks)
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    blocks.add_module("3", block)
    head = nn.Linear(2, 2)
    stage.add_module("head", head)
    assert list(layers(stage)) == [block, head]


def test_a_model_without_a_list_is_one_unit() -> None:
    assert units(nn.Linear(2, 2)) == []


def test_a_torch_whose_fsdp2_lacks_what_is_asked_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cpu"))
    with refused(ArgumentError, "fsdp"):
        Fsdp(Ranks(2))


def test_shard_ranks_that_do_not_divide_the_ranks_are_refused() -> None:
    with refused(ArgumentError, "shard_ranks"):
        Fsdp(Ranks(4), shard_ranks=3)
