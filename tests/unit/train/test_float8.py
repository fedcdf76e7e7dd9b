"""Linear layers in float8, emulated: their products, and that all else of a run knows nothing of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine
from evenstep.cli.check import footprint
from evenstep.precision import Float8Mixed
from evenstep.train import Aborted, Committed
from kit import Squares, cut, engine_of, filled, points, stacked, train

pytest.importorskip("torchao", reason="the extra `float8` is not installed")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(torch.tanh(self.inner(self.norm(x)))))


class Float(Squares):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output.float(), batch)


def net() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(3, 16), Block(), Block(), nn.Linear(16, 1)))


def batch(count: int = 8) -> list[Tensor]:
    return stacked(points(count, dtype=torch.float32))


def of(model: nn.Module, precision: Any = None, **more: Any) -> Engine:
    return engine_of(model, Float(), precision=precision or Float8Mixed(emulate=True), **more)


def values(engine: Engine) -> Tensor:
    return torch.cat([one.double().flatten() for one in engine.state_dict()["model"].values()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_does_not_depend_on_the_cut_but_by_the_roundings_of_bfloat16(recipe: Any) -> None:
    """Scales are powers of two: values of one magnitude are rounded alike, whatever else is in their micro-batch."""

    def gradient(precision: Any, size: int) -> Tensor:
        torch.manual_seed(0)
        inner = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        model = nn.Sequential(nn.Linear(3, 16), *inner, nn.Linear(16, 1))
        engine = of(model, precision, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
        before = values(engine)
        engine.update(microbatches=cut(batch(32), size))
        return before - values(engine)

    def apart(precision: Any) -> float:
        whole = gradient(precision(), 32)
        return float((gradient(precision(), 5) - whole).norm() / whole.norm())

    assert apart(lambda: Float8Mixed(recipe=recipe, emulate=True)) <= 4 * apart(lambda: "bf16-mixed") + 1e-6


def test_what_is_not_finite_is_not_rounded_away() -> None:
    """Casts to float8 take large values to the largest there is; inf and NaN must still be seen by the verdict."""
    for bad in (float("inf"), float("nan")):
        engine = of(net(), Float8Mixed(emulate=True, recipe="rowwise"))
        x, y = batch()
        y[3] = bad
        before = values(engine)
        assert isinstance(engine.update((x, y)), Aborted)
        assert torch.equal(values(engine), before)
        assert isinstance(engine.update(batch()), Committed)


def test_a_layer_keeps_its_parameters_names_hooks_and_references() -> None:
    model: Any = net()
    inner, calls = model[1].inner, list[Any]()
    inner.register_forward_hook(lambda *_: calls.append(1))
    parameters = dict(model.named_parameters())
    engine = train(of(model), range(1))
    assert model[1].inner is inner and isinstance(inner, nn.Linear) and type(inner) is not nn.Linear
    assert type(model[0]) is type(model[3]) is nn.Linear
    assert all(one is parameters[name] and one.dtype == torch.float32 for name, one in model.named_parameters())
    assert calls
    assert {str(one.dtype) for one in engine.state_dict()["model"].values()} == {"torch.float32"}
    assert sum(footprint(engine).values()) == 16 * sum(one.numel() for one in model.parameters())
