"""What float8-mixed is refused with, and of which layers it would be; nothing here needs torchao."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.precision import Float8Mixed, float8
from evenstep.train.linear_layers import choose_linear_layers
from refused import refused

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def block(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))


def net() -> nn.Module:
    return nn.ModuleDict(
        {"embedding": nn.Embedding(5, 16), "blocks": nn.ModuleList([block(), block()]), "head": nn.Linear(16, 32)}
    )


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded, instead of torchao."""
    loaded: list[str] = []
    monkeypatch.setattr(float8, "load_optional", lambda module, *_: loaded.append(module))
    return loaded


def test_other_devices_are_refused_and_emulation_runs_on_all(loads: list[str]) -> None:
    with refused(ArgumentError, "precision"):
        Float8Mixed().check(CPU)
    assert not loads
    Float8Mixed(emulate=True).check(CPU)


@pytest.mark.parametrize(("capability", "can"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_support_of_a_gpu_follows_from_its_compute_capability(
    capability: tuple[int, int], can: bool, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Fake")
    with nullcontext() if can else refused(ArgumentError, "precision"):
        Float8Mixed().check(CUDA)
    assert bool(loads) == can


def test_by_default_the_linear_layers_of_blocks_are_meant_and_the_head_is_not() -> None:
    meant = choose_linear_layers(net(), Float8Mixed()).names
    assert meant == ("blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2")
    assert choose_linear_layers(net(), Float8Mixed(layers="*")).names == (*meant, "head")
    assert choose_linear_layers(net(), Float8Mixed(layers="head")).names == ("head",)


def test_layers_that_can_not_be_are_left_as_they_are() -> None:
    class Own(nn.Linear):
        def forward(self, input: Any) -> Any:
            return -super().forward(input)

    odd = nn.Sequential(nn.Linear(16, 30), nn.Linear(30, 16), nn.Linear(16, 16), Own(16, 16))
    odd.append(nn.MultiheadAttention(16, 2)).append(nn.Linear(16, 16, dtype=torch.float64))
    assert choose_linear_layers(nn.ModuleList([odd]), Float8Mixed(layers="0")).names == ("0.2",)


def test_a_choice_without_a_fitting_layer_is_refused() -> None:
    for model, layers in ((nn.ModuleList([block(10), block(10)]), "blocks"), (net(), "embedding"), (net(), "haed")):
        with pytest.raises(ArgumentError):
            choose_linear_layers(model, Float8Mixed(layers=layers))
