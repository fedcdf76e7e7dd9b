"""Dynamic loss scales, and layers that float8 is for."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.precision import PRECISIONS, Float8Mixed, Fp16Mixed, LossScale, LossScaled, float8
from evenstep.train.blocks import choose_linear_layers
from refused import refused

SCALED: list[Any] = [kind for kind in PRECISIONS.values() if issubclass(kind, LossScaled)]


def scale_of(**options: Any) -> LossScale:
    return Fp16Mixed(**options).build_loss_scale()


def commit(scale: LossScale, count: int) -> None:
    for _ in range(count):
        scale.committed()


@pytest.mark.parametrize("kind", SCALED)
def test_the_scale_doubles_after_each_growth_window(kind: Any) -> None:
    scale = kind(initial=4.0, growth_updates=5).build_loss_scale()
    values: list[float] = []
    for _ in range(10):
        scale.committed()
        values.append(scale.value)
    assert values == [4.0] * 4 + [8.0] * 5 + [16.0]


def test_an_overflow_halves_the_scale_and_restarts_the_window() -> None:
    scale = scale_of(initial=8.0, growth_updates=3)
    commit(scale, 2)
    scale.halve()
    assert scale.value == 4.0
    commit(scale, 2)
    assert scale.value == 4.0
    commit(scale, 1)
    assert scale.value == 8.0


def test_a_state_holds_all_that_the_next_scales_depend_on() -> None:
    events = [True, True, False, True, False, False, True, True, True, True, True, False, True] * 3
    for at in range(len(events)):
        one, other = (scale_of(initial=2.0**20, growth_updates=3, floor=2.0**-20) for _ in range(2))
        for number, committed in enumerate(events):
            if number == at:
                other.load_state_dict(one.state_dict())
            for scale in (one, other) if number >= at else (one,):
                scale.committed() if committed else scale.halve()
        assert one.state_dict() == other.state_dict()


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
    meant = tuple(choose_linear_layers(net(), Float8Mixed()))
    assert meant == ("blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2")
    assert tuple(choose_linear_layers(net(), Float8Mixed(layers="*"))) == (*meant, "head")
    assert tuple(choose_linear_layers(net(), Float8Mixed(layers="head"))) == ("head",)


def test_layers_that_can_not_be_are_left_as_they_are() -> None:
    class Own(nn.Linear):
        def forward(self, input: Any) -> Any:
            return -super().forward(input)

    odd = nn.Sequential(nn.Linear(16, 30), nn.Linear(30, 16), nn.Linear(16, 16), Own(16, 16))
    odd.append(nn.MultiheadAttention(16, 2)).append(nn.Linear(16, 16, dtype=torch.float64))
    assert tuple(choose_linear_layers(nn.ModuleList([odd]), Float8Mixed(layers="0"))) == ("0.2",)
