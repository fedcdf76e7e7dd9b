from collections.abc import Callable
from math import log
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.fixture(scope="module")
def model_file(recipe_file: Callable[[str], ModuleType]) -> ModuleType:
    return recipe_file("gpt_bytes/model.py")


@pytest.fixture
def build(model_file: ModuleType) -> Callable[..., Any]:
    def build(**more: float) -> Any:
        torch.manual_seed(0)
        return model_file.ByteGPT(**{"layers": 2, "width": 32, "heads": 4, "context": 24, **more})

    return build


def some_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changed", [0, 1, 11, 23])
def test_a_byte_changes_no_output_before_it_and_all_from_it_on(build: Callable[..., Any], changed: int):
    model = build()
    inputs = some_bytes(2, 24)
    other = inputs.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    before, after = model(inputs), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] - after[:, changed:]).abs().amax(-1).min() > 1e-6


def test_the_first_loss_is_about_eight_bits(build: Callable[..., Any]):
    logits = build(width=128, layers=4)(some_bytes(16, 24))
    bits = F.cross_entropy(logits.flatten(0, 1), torch.arange(16 * 24) * 7 % 256) / log(2)
    assert bits.item() == pytest.approx(8.0, abs=0.2)


def test_a_generator_decides_what_is_generated(build: Callable[..., Any]):
    model = build()

    def draw(seed: int) -> bytes:
        return model.generate(b"a", num_bytes=8, generator=torch.Generator().manual_seed(seed))

    assert len(draw(1)) == 8
    assert draw(1) == draw(1) != draw(2)
