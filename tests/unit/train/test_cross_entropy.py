"""A cross-entropy in chunks beside the plain one: values, gradients, memory, and in a model in stages."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from evenstep import Fp16Mixed, MapData, PipelineModel, Task, Trainer, chunked_cross_entropy
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Mesh
from evenstep.pipeline import Layer, Layers
from refused import refused

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from harness.live import Live

OnRanks = Callable[..., list[Any]]
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


@settings(max_examples=40)
@given(tokens=st.integers(0, 30), chunk_tokens=st.integers(1, 40), seed=st.integers(0, 99), by=st.floats(-3, 3))
def test_value_and_gradients_are_those_of_the_plain_one_in_any_chunks(
    tokens: int, chunk_tokens: int, seed: int, by: float
) -> None:
    given = example(tokens, seed=seed)
    value, gradients = taken(chunked_cross_entropy, given, by, chunk_tokens=chunk_tokens)
    expected, others = taken(plain, given, by)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, others, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("left_out", [("bias",), ("weights",), ("bias", "weights")])
def test_bias_and_weights_may_be_left_out(left_out: tuple[str, ...]) -> None:
    given = {name: one for name, one in example(17).items() if name not in left_out}
    value, gradients = taken(chunked_cross_entropy, given, chunk_tokens=5)
    expected, others = taken(plain, given)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients, others)


def test_leading_dims_are_tokens() -> None:
    given = example(24)
    shaped = {
        name: one.unflatten(0, (2, 3, 4)) if name in ("hidden", "targets", "weights") else one
        for name, one in given.items()
    }
    value, (of_hidden, *_) = taken(chunked_cross_entropy, shaped, chunk_tokens=7)
    expected, (other, *_) = taken(plain, given)
    assert of_hidden is not None and other is not None
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(of_hidden.flatten(0, 2), other)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_makes_products_in_its_format_and_gradients_in_the_inputs(dtype: torch.dtype) -> None:
    given = example(64, vocab=40, dtype=torch.float32)
    exact_value, exact = taken(plain, {name: one.double() if name != "targets" else one for name, one in given.items()})
    results: list[tuple[Tensor, Gradients]] = []
    for loss, more in ((chunked_cross_entropy, {"chunk_tokens": 9}), (plain, {})):
        with torch.autocast("cpu", dtype):
            results.append(taken(loss, given, **more))
    (value, gradients), (expected, others) = results
    assert value.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact_value, rtol=torch.finfo(dtype).eps, atol=0)
    for one, other, right in zip(gradients, others, exact, strict=True):
        assert one is not None and other is not None and right is not None and one.dtype == torch.float32
        plain_error = (other.double() - right).norm()
        assert (one.double() - right).norm() <= 1.1 * plain_error + 1e-6 * right.norm()


def test_no_tokens_that_count_give_0_and_no_gradient() -> None:
    given = example(6)
    given["targets"][:] = -100
    value, gradients = taken(chunked_cross_entropy, given, chunk_tokens=4)
    assert value == 0
    assert all(one is not None and not one.any() for one in gradients)


def test_a_matrix_that_also_embeds_gets_both_gradients() -> None:
    numbers, targets = torch.randint(9, (20,)), torch.randint(9, (20,))
    matrix = torch.randn(9, 4, dtype=torch.float64)
    found: list[Tensor] = []
    for loss in (chunked_cross_entropy, plain):
        tied = matrix.clone().requires_grad_()
        loss(torch.tanh(nn.functional.embedding(numbers, tied)), tied, targets).backward()
        assert tied.grad is not None
        found.append(tied.grad)
    torch.testing.assert_close(found[0], found[1])


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


class Head(nn.Linear):
    """Gives what it would be applied to, and its matrix."""

    def forward(self, input: Tensor) -> Any:
        return input, self.weight


class NextNumber(Task):
    def __init__(self, *, chunked: bool = True) -> None:
        self.chunked = chunked

    def weight(self, batch: Any) -> Any:
        return (batch[1] != -100).sum()

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.chunked:
            return chunked_cross_entropy(*output, batch[1], chunk_tokens=5)
        return plain(*output, batch[1])


def tied_model() -> Layers:
    """The head's matrix is the embedding's."""

    def filled(module: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        return module

    layers = (
        Layer("embedding", lambda: filled(nn.Embedding(12, 4))),
        Layer("middle", lambda: filled(nn.Linear(4, 4))),
        Layer("bend", nn.Tanh),
        Layer("head", lambda: filled(Head(4, 12, bias=False))),
    )
    return Layers(layers, ties=(("embedding.weight", "head.weight"),))


def trained(model: PipelineModel, strategy: Any, *, chunked: bool = True, **more: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(12, (20, 7), generator=generator)
    labels = numbers.roll(-1, 1).masked_fill(numbers % 5 == 0, -100)
    trainer = Trainer(
        model=model,
        task=NextNumber(chunked=chunked),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        data=MapData(torch.utils.data.TensorDataset(numbers, labels), global_batch_size=8, micro_batch_size=2),
        updates=6,
        device="cpu",
        strategy=strategy,
        **more,
    )
    trainer.train()
    return trainer.state_dict()["model"]


def test_as_the_last_stage_of_a_pipeline_with_a_tied_matrix_it_has_the_bits_of_one_process(on_ranks: OnRanks) -> None:
    alone = trained(PipelineModel(tied_model()), Ddp())

    def act(group: Any) -> dict[str, Tensor]:
        mesh = Mesh.of(group, pipeline=2)
        return trained(PipelineModel(tied_model(), mesh=mesh), Ddp(mesh.data))

    staged = on_ranks(2, act)[0]
    assert staged.keys() == alone.keys()
    assert all(torch.equal(staged[name], alone[name]) for name in alone)
    without = trained(PipelineModel(tied_model()), Ddp(), chunked=False)
    for name, value in without.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-4, atol=1e-5)


def test_a_run_in_float16_trains_as_with_the_plain_one() -> None:
    runs = [
        trained(PipelineModel(tied_model()), Ddp(), chunked=chunked, precision=Fp16Mixed()) for chunked in (True, False)
    ]
    for name, value in runs[1].items():
        torch.testing.assert_close(runs[0][name], value, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"targets": torch.ones(4, dtype=torch.int64)}, "targets"),
        ({"targets": torch.ones(5)}, "targets"),
        ({"targets": torch.ones(5, dtype=torch.bool)}, "targets"),
        ({"weights": torch.ones(4)}, "weights"),
        ({"weights": torch.ones(5, requires_grad=True)}, "weights"),
        ({"weight": torch.ones(11, 6, dtype=torch.bfloat16)}, "hidden"),
    ],
)
def test_what_does_not_go_together_is_refused(changed: dict[str, Any], field: str) -> None:
    with refused(ArgumentError, field):
        chunked_cross_entropy(**(example(5, dtype=torch.float32) | changed))
