"""The model compiled: what is compiled by itself, what is refused or named, and that the run is the one uncompiled.

Most tests let torch find its graphs and run them as they were found, which takes milliseconds; those that are slow let
its compiler make machine code of them.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Engine, Task, Training
from evenstep.errors import ArgumentError
from evenstep.options import Memory
from evenstep.pipeline import PipelineModel
from evenstep.pipeline import compiled as forwards
from evenstep.train import Aborted, Committed
from evenstep.train.compiled import compiled_parts
from refused import refused

# torch's own, while it compiles a part that is called with the output of another
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

WIDTH = 6
Batches = list[tuple[Tensor, Tensor]]


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


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()

    def split(self, batch: Any) -> list[Any]:  # without which `check_loss=False` would leave batches whole
        return super().split(batch)


def chain(*, stages: int = 1, schedule: str = "1f1b") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, 1))
    return PipelineModel(model, stages_per_rank=stages, schedule=schedule) if stages > 1 else model


def batches(update: int, sizes: tuple[int, ...] = (4, 4)) -> Batches:
    generator = torch.Generator().manual_seed(update)
    return [(torch.randn(size, 3, generator=generator), torch.randn(size, generator=generator)) for size in sizes]


def engine_of(model: nn.Module, compile: str = "model", **more: Any) -> Engine:
    train = Training(compile=compile, clip_norm=1.0, **more.pop("train", {}))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    return Engine(model, Squares(), optimizer, device="cpu", train=train, **more)


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def trained(model: nn.Module, compile: str = "model", *, updates: int = 4, **more: Any) -> Tensor:
    engine = engine_of(model, compile, **more)
    for update in range(updates):
        outcome = engine.update(microbatches=batches(update, (4, 4) if update % 3 else (4, 3)))
        assert isinstance(outcome, Committed)
    return parameters(model)


@pytest.fixture
def as_found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs are run as torch has found them; gives them."""
    torch.compiler.reset()
    graphs: list[Any] = []
    compile = torch.compile

    def found(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda forward, **_: compile(forward, dynamic=False, backend=found))
    return graphs


def test_each_shape_and_mode_is_compiled_once_for_all_blocks(as_found: list[Any]) -> None:
    engine = engine_of(chain())
    counts: list[int] = []
    for update, sizes in enumerate([(4, 4), (4, 3), (4, 4), (3, 4)]):
        engine.update(microbatches=batches(update, sizes))
        counts.append(len(as_found))
    engine.evaluate(microbatches=batches(9))
    engine.evaluate(microbatches=batches(9))
    engine.update(microbatches=batches(9))
    assert counts == [1, 2, 2, 2] and len(as_found) == 3


def test_a_layer_with_random_numbers_of_its_own_is_refused() -> None:
    with refused(ArgumentError, "compile"):
        engine_of(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1), nn.Linear(2, 1)))


def test_blocks_are_compiled_one_by_one_and_single_operations_are_not() -> None:
    assert [*compiled_parts(chain())] == ["1", "2", "3"]
    assert [*compiled_parts(chain(stages=3))] == ["1", "2", "3"]
    assert [*compiled_parts(Listed())] == ["blocks.0", "blocks.1"]
    assert [*compiled_parts(Listed(1))] == [""]


@pytest.mark.usefixtures("as_found")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_compiled_run_is_the_run_that_is_not_in_other_formats(precision: str) -> None:
    assert torch.equal(trained(chain(), precision=precision), trained(chain(), "off", precision=precision))


@pytest.mark.usefixtures("as_found")
def test_a_micro_batch_that_does_not_fit_is_cut_and_compiled_in_pieces() -> None:
    class Narrow(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    found: list[Tensor] = []
    for compile in ("model", "off"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, WIDTH), Narrow(0.0), nn.Linear(WIDTH, 1))

        def full(module: Any, args: Any) -> None:
            if len(args[0]) > 2:
                raise torch.OutOfMemoryError("no memory for so many")

        model.get_submodule("1").register_forward_pre_hook(full)
        found.append(trained(model, compile, train={"check_loss": False}))
    assert torch.equal(found[0], found[1])


def test_recomputed_activations_are_refused_together_with_compile() -> None:
    with refused(ArgumentError, "compile"):
        Training(compile="model", memory=Memory(checkpoint="blocks"))


@pytest.mark.usefixtures("as_found")
@pytest.mark.parametrize("stages", [1, 3])
def test_a_compiled_run_is_the_run_that_is_not_with_the_same_dropout(stages: int) -> None:
    assert torch.equal(trained(chain(stages=stages)), trained(chain(), "off"))


@pytest.mark.usefixtures("as_found")
def test_schedules_that_split_the_backward_leave_that_of_a_compiled_block_whole() -> None:
    model = chain(stages=2)
    assert torch.equal(trained(model), trained(chain(), "off"))
    assert not any(type(part).__name__ == "DeferredLinear" for part in model.modules())


@pytest.mark.usefixtures("as_found")
def test_a_model_without_blocks_is_compiled_as_a_whole() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    model = net()
    assert torch.equal(trained(model), trained(net(), "off"))
    assert forwards.is_compiled(model)


@pytest.mark.usefixtures("as_found")
def test_names_copies_and_states_are_those_of_the_model_as_it_is_written() -> None:
    model = chain()
    names = [*model.state_dict()]
    engine = engine_of(model)
    engine.update(microbatches=batches(0))
    assert [*model.state_dict()] == names
    other = copy.deepcopy(model)
    assert not any(map(forwards.is_compiled, other.modules()))
    engine.update(microbatches=batches(1))
    x = torch.ones(2, 3)
    model.eval()
    other.eval()
    assert not torch.equal(model(x), other(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))


@pytest.mark.usefixtures("as_found")
def test_a_run_is_resumed_with_the_same_bits_and_only_compiled() -> None:
    whole = chain()
    engine = engine_of(whole, train={"ema": Ema(decay=0.9)})
    for update in range(2):
        engine.update(microbatches=batches(update))
    state = copy.deepcopy(engine.state_dict())
    for update in range(2, 4):
        engine.update(microbatches=batches(update))
    model = chain(stages=3)
    resumed = engine_of(model, train={"ema": Ema(decay=0.9)})
    resumed.load_state_dict(state)
    for update in range(2, 4):
        resumed.update(microbatches=batches(update))
    assert torch.equal(parameters(model), parameters(whole))
    assert "train.compile" in engine_of(chain(), "off").state.changed_settings(state)


@pytest.mark.usefixtures("as_found")
def test_statistics_of_aborted_updates_are_taken_back() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    model = Normed()
    engine = engine_of(model)
    engine.update(microbatches=batches(0))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    x, y = batches(1)[0]
    outcome = engine.update((x, y * float("inf")))
    assert isinstance(outcome, Aborted)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert "loss" in str(engine.explain(outcome)[1])


@pytest.mark.slow
def test_machine_code_gives_the_run_within_1e_6_and_two_such_runs_the_same_bits() -> None:
    torch.compiler.reset()
    eager = trained(chain(), "off", updates=50)
    one = trained(chain(), updates=50)
    torch.compiler.reset()
    other = trained(chain(stages=3), updates=50)
    assert torch.equal(one, other)
    assert (one - eager).norm() / eager.norm() < 1e-6
