"""The model or the whole update compiled: parts that are compiled, refusals, and that the run is the one uncompiled.

Most tests let torch find its graphs and run them as they were found, which takes milliseconds; those that are slow let
its compiler make machine code of them.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Training
from evenstep.contrib.compiled_update import compilations
from evenstep.errors import ArgumentError
from evenstep.options import Memory
from evenstep.pipeline import PipelineModel
from evenstep.pipeline import compiled as forwards
from evenstep.train import Committed
from evenstep.train.blocks import compiled_parts
from kit import Squares, engine_of, filled, flat, points, stacked
from refused import refused

# torch's own, while it compiles a part that is called with the output of another
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

WIDTH = 6


class Block(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(nn.functional.gelu(self.inner(self.norm(x)))))


class Listed(nn.Module):
    """Blocks in a list, of which nobody says that they are layers."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Cuts(Squares):
    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


def chain(*, stages: int = 1, blocks: int = 3, dropout: float = 0.3) -> Any:
    inner = (Block(dropout) for _ in range(blocks))
    model = filled(nn.Sequential(nn.Linear(3, WIDTH), *inner, nn.Linear(WIDTH, 1)))
    return PipelineModel(model, stages_per_rank=stages) if stages > 1 else model


def batches(update: int, sizes: tuple[int, ...] = (4, 4), dtype: torch.dtype = torch.float32) -> list[Any]:
    return [stacked(points(size, seed=3 * update + place, dtype=dtype)) for place, size in enumerate(sizes)]


def of(model: nn.Module, compile: str = "model", **more: Any) -> Engine:
    train = Training(compile=compile, clip_norm=1.0, **more.pop("train", {}))  # type: ignore[arg-type]
    return engine_of(model, Cuts(), train=train, **more)


def trained(model: nn.Module, compile: str = "model", *, updates: int = 4, **more: Any) -> Tensor:
    engine = of(model, compile, **more)
    for update in range(updates):
        outcome = engine.update(microbatches=batches(update, (4, 4) if update % 3 else (4, 3)))
        assert isinstance(outcome, Committed)
    return flat(model)


@pytest.fixture
def as_found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs are run as torch has found them; gives them."""
    torch.compiler.reset()
    graphs: list[Any] = []
    compile = torch.compile

    def found(graph: Any, inputs: Any, **_: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(forward: Any, *, backend: Any = None, options: Any = None, **given: Any) -> Any:
        if backend is None:
            return compile(forward, dynamic=False, backend=found)
        return compile(forward, backend=backend, options=options, **given)

    monkeypatch.setattr(compilations, "compile_graph", found)
    monkeypatch.setattr(torch, "compile", compiled)
    return graphs


def test_each_shape_and_mode_is_compiled_once_for_all_blocks(as_found: list[Any]) -> None:
    engine, counts = of(chain()), list[int]()
    for update, sizes in enumerate([(4, 4), (4, 3), (4, 4), (3, 4)]):
        engine.update(microbatches=batches(update, sizes))
        counts.append(len(as_found))
    engine.evaluate(microbatches=batches(9))
    engine.evaluate(microbatches=batches(9))
    assert counts == [1, 2, 2, 2] and len(as_found) == 3


@pytest.mark.parametrize(
    "act",
    [
        lambda: of(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1), nn.Linear(2, 1))),
        lambda: Training(compile="model", memory=Memory(checkpoint="blocks")),
    ],
    ids=["a layer with random numbers of its own", "activations computed again"],
)
def test_compile_is_refused_with(act: Callable[[], Any]) -> None:
    with refused(ArgumentError, "compile"):
        act()


def test_blocks_are_compiled_one_by_one_and_single_operations_are_not() -> None:
    assert [*compiled_parts(chain())] == [*compiled_parts(chain(stages=3))] == ["1", "2", "3"]
    assert [*compiled_parts(Listed())] == ["blocks.0", "blocks.1"]
    assert [*compiled_parts(Listed(1))] == [""]


@pytest.mark.usefixtures("as_found")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_compiled_run_has_the_bits_of_one_that_is_not(precision: str) -> None:
    assert torch.equal(trained(chain(), precision=precision), trained(chain(), "off", precision=precision))


@pytest.mark.usefixtures("as_found")
def test_a_compiled_run_in_stages_has_the_bits_of_one_that_is_not() -> None:
    model = chain(stages=3)
    assert torch.equal(trained(model), trained(chain(), "off"))
    assert not any(type(part).__name__ == "DeferredLinear" for part in model.modules())


@pytest.mark.usefixtures("as_found")
def test_a_model_without_blocks_is_compiled_as_a_whole() -> None:
    def net() -> nn.Module:
        return filled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))

    model = net()
    assert torch.equal(trained(model), trained(net(), "off"))
    assert forwards.is_compiled(model)


@pytest.mark.usefixtures("as_found")
def test_names_copies_and_states_are_those_of_the_model_as_it_is_written() -> None:
    model = chain()
    names = [*model.state_dict()]
    engine = of(model)
    engine.update(microbatches=batches(0))
    assert [*model.state_dict()] == names
    other = copy.deepcopy(model)
    assert not any(map(forwards.is_compiled, other.modules()))
    engine.update(microbatches=batches(1))
    x = torch.ones(2, 3)
    assert not torch.equal(model.eval()(x), other.eval()(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))
