"""A cross-entropy in chunks beside the plain one: values, gradients and memory."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from evenstep import chunked_cross_entropy

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from harness.live import Live

Gradients = list[Tensor | None]


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    scores = linear(hidden, weight, bias).flatten(0, -2)
    losses = cross_entropy(scores, targets.flatten(), reduction="none")
    return (losses if weights is None else losses * weights.flatten()).sum()


def example(
    tokens: int, vocab: int = 11, width: int = 6, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[::4] = -100
    return {
        "hidden": drawn(tokens, width),
        "weight": drawn(vocab, width),
        "bias": drawn(vocab),
        "targets": targets,
        "weights": drawn(tokens).abs(),
    }


def taken(
    loss: Callable[..., Tensor], given: dict[str, Tensor], by: float = 1.0, **more: Any
) -> tuple[Tensor, Gradients]:
    """Value and gradients, of the loss times `by`."""
    own = {name: one.clone() for name, one in given.items()}
    leaves = [own[name].requires_grad_() for name in ("hidden", "weight", "bias") if name in own]
    value = loss(**own, **more)
    (value * by).backward()
    return value.detach(), [leaf.grad for leaf in leaves]


@settings(max_examples=25)
@given(tokens=st.integers(0, 30), chunk_tokens=st.integers(1, 40), seed=st.integers(0, 99), by=st.floats(-3, 3))
def test_value_and_gradients_are_those_of_the_plain_one_in_any_chunks(
    tokens: int, chunk_tokens: int, seed: int, by: float
) -> None:
    given = example(tokens, seed=seed)
    value, gradients = taken(chunked_cross_entropy, given, by, chunk_tokens=chunk_tokens)
    expected, others = taken(plain, given, by)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, others, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_16_bits_are_as_near_to_float64_as_the_plain_ones(dtype: torch.dtype) -> None:
    given = example(64, vocab=40, dtype=dtype)
    exact = {name: one.double() if one.is_floating_point() else one for name, one in given.items()}
    value, gradients = taken(chunked_cross_entropy, given, chunk_tokens=10)
    expected, others = taken(plain, exact)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(value.double(), expected, rtol=2 * unit, atol=0)
    for one, other in zip(gradients, others, strict=True):
        assert one is not None and other is not None and one.dtype == dtype
        assert (one.double() - other).norm() < 2 * unit * other.norm()
    assert value.dtype == torch.float32


def test_the_scores_of_all_tokens_are_never_in_memory() -> None:
    tokens, vocab, width, chunk = 256, 1000, 16, 16
    given = example(tokens, vocab, width, dtype=torch.float32)
    peaks: list[int] = []
    for loss, more in ((chunked_cross_entropy, {"chunk_tokens": chunk}), (plain, {})):
        with Live(given.values()) as live:
            taken(loss, given, **more)
        peaks.append(live.peak)
    scores = 4 * tokens * vocab  # bytes of float32
    fixed = 4 * (vocab * (width + 1) + tokens * (width + 8)) * 4  # arguments, gradients and vectors, some copied
    assert peaks[0] < fixed + 4 * 4 * chunk * vocab < scores
    assert peaks[1] > 2 * scores
