"""Updates compiled as a whole: the run is the one that is not compiled, and what no graph can hold is refused.

Most tests let torch find its graphs and run them as they were found, which takes milliseconds; those that are slow let
its compiler make machine code of them.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from evenstep import Ema, Engine, Loss, Task, Training
from evenstep.contrib.compiled_update import check_hooks, compilations
from evenstep.contrib.compiled_update import update as module
from evenstep.contrib.compiled_update.formulas import OptimizerState
from evenstep.contrib.compiled_update.update import CompiledUpdate
from evenstep.errors import ArgumentError
from evenstep.events import Hook, Statistics
from evenstep.parallel import Ddp
from evenstep.pipeline import PipelineModel
from evenstep.train import Aborted, Committed
from refused import refused

# torch's own, while it follows what it compiles
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

WIDTH = 6
Batches = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.idle = nn.Linear(2, 2)  # gets no gradient
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.last(nn.functional.gelu(self.norm(self.first(x))))


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Loss:
        error = output.squeeze(-1) - batch[1]
        return Loss((error**2).sum(), metrics={"close": ((error.abs() < 0.5).sum(), len(error)), "one": (2.0, 2)})


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(update: int, sizes: tuple[int, ...] = (4, 4)) -> Batches:
    generator = torch.Generator().manual_seed(update)
    return [(torch.randn(size, 3, generator=generator), torch.randn(size, generator=generator)) for size in sizes]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-2, momentum=0.9)


def engine_of(
    model: nn.Module, compile: str = "update", *, task: Any = None, optimizer: Any = momentum, **more: Any
) -> Engine:
    train = Training(compile=compile, clip_norm=1.0, **more.pop("train", {}))  # type: ignore[arg-type]
    return Engine(model, task or Squares(), optimizer(model), device="cpu", train=train, **more)


def values(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten().double() for one in model.state_dict().values()])


def graphs_of(engine: Engine) -> int:
    """How many graphs were compiled in this process."""
    update = engine.parts.compute
    assert isinstance(update, CompiledUpdate)
    return update.backend.graphs


def run(engine: Engine, updates: int, *, start: int = 0) -> list[dict[str, float]]:
    """Each fifth update has a short last micro-batch; gives all metrics."""
    found: list[dict[str, float]] = []
    for update in range(start, start + updates):
        outcome = engine.update(microbatches=batches(update, (4, 4) if update % 5 else (4, 3)))
        assert isinstance(outcome, Committed)
        found.append({**outcome.metrics(), "norm": outcome.grad_norm, "weight": outcome.weight})
    return found


def assert_alike(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], rel=1e-5) for name in mine)


def distance(one: nn.Module, other: nn.Module) -> float:
    return float((values(one) - values(other)).norm() / values(other).norm())


@pytest.fixture
def as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are run as torch has found them."""
    torch.compiler.reset()

    def forward_of(graph: Any, inputs: Any, *, captured: bool) -> Any:
        return graph.forward

    monkeypatch.setattr(compilations, "compile_graph", forward_of)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are run as found, and as CUDA's captured ones.

    What one gives is overwritten when the next is run, whichever that is; and what one writes to must be known to stay.
    """
    torch.compiler.reset()
    given, kept = list[Tensor](), set[int]()

    def forward_of(graph: Any, inputs: Any, *, captured: bool) -> Any:
        def run(*args: Any) -> Any:
            for one in given:
                one.fill_(7)
            before = [one._version for one in args]
            output = graph.forward(*args)
            written = [one for one, version in zip(args, before, strict=True) if one._version != version]
            assert {id(one) for one in written} <= kept
            given[:] = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
            return output

        return run

    monkeypatch.setattr(compilations, "compile_graph", forward_of)
    monkeypatch.setattr(module, "INDUCTOR", compilations.CAPTURED)
    monkeypatch.setattr(module, "keep_address", lambda tensors: kept.update(map(id, tensors)))


def compared(updates: int) -> None:
    """A compiled run and one that is not, with an average, a schedule, short last batches and an update without end."""
    found: list[tuple[nn.Module, dict[str, torch.Tensor], list[dict[str, float]]]] = []
    for compile in ("update", "off"):
        model = net()
        engine = engine_of(
            model,
            compile,
            optimizer=adamw,
            train={"ema": Ema(decay=0.9, start_update=2, every_updates=2)},
            lr_schedule={"kind": "cosine", "warmup_updates": 3},
            updates=updates,
        )
        begun = graphs_of(engine) if compile == "update" else 0
        metrics = run(engine, updates - 2)
        if compile == "update":
            x, y = batches(0)[0]
            outcome = engine.update(microbatches=[(x, y * float("inf")), batches(0)[1]])
            assert isinstance(outcome, Aborted) and outcome.incident.kind == "non_finite"
        metrics += run(engine, 2, start=updates - 2)
        found.append((model, engine.state_dict()["ema"], metrics))
        if compile == "update":
            assert graphs_of(engine) == begun + 2
            torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)  # a hook of the step
            with refused(ArgumentError, "compile"):
                engine.update(microbatches=batches(1))
    (model, average, compiled_metrics), (eager, expected, metrics) = found
    assert distance(model, eager) < 1e-6
    assert_alike(compiled_metrics, metrics)
    for name, one in expected.items():
        assert torch.allclose(average[name], one, rtol=1e-5, atol=1e-6), name


@pytest.mark.usefixtures("as_found")
def test_a_compiled_update_is_the_one_that_is_not() -> None:
    compared(7)


@pytest.mark.usefixtures("captured")
def test_captured_graphs_may_overwrite_what_they_gave_and_write_to_what_stays() -> None:
    found: list[tuple[nn.Module, list[dict[str, float]]]] = []
    for compile in ("update", "off"):
        torch.manual_seed(0)
        model = Sharing()
        found.append((model, run(engine_of(model, compile, train={"ema": Ema(decay=0.9)}), 4)))
        assert model.tied.weight is model.first.weight and model.again is model.norm
    assert distance(found[0][0], found[1][0]) < 1e-6
    assert_alike(found[0][1], found[1][1])


@pytest.mark.slow
def test_machine_code_gives_the_run_within_1e_6_after_50_updates() -> None:
    torch.compiler.reset()
    compared(50)


@pytest.mark.usefixtures("as_found")
def test_what_a_value_in_a_batch_chooses_is_trained() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(3, 2), nn.ModuleList(nn.Linear(2, 1) for _ in range(2))

        def forward(self, x: Tensor, head: int) -> Tensor:
            return self.heads[head](self.body(x).tanh())

    class OfHead(Squares):
        def inputs(self, batch: Any) -> Any:
            return batch[0], batch[2]

    found: list[Tensor] = []
    for compile in ("off", "update"):
        torch.manual_seed(0)
        engine = engine_of(model := Heads(), compile, task=OfHead(), optimizer=momentum)
        begun = graphs_of(engine) if compile == "update" else 0
        for update in range(4):
            engine.update(microbatches=[(*batch, update % 2) for batch in batches(update)])
        found.append(values(model))
        assert compile == "off" or graphs_of(engine) == begun + 2
    assert torch.allclose(*found, atol=1e-6)


class Sharing(nn.Module):
    """A weight in two modules, and a module in two places."""

    def __init__(self) -> None:
        super().__init__()
        # without biases, whose gradients before BatchNorm are pure rounding
        self.first, self.tied = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 1)
        self.tied.weight = self.first.weight
        self.norm = self.again = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.tied(torch.tanh(self.norm(self.first(x))))))


def sees(*_: Any) -> None: ...


def hooked(model: nn.Module) -> nn.Module:
    model.get_submodule("first").register_forward_hook(sees)
    return model


def hooked_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.register_step_post_hook(sees)
    return optimizer


class Late(Squares):
    late_weight = True


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (lambda: hooked(net()), {}),
        (lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None), net()), {}),
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True), net()), {}),
        (lambda: PipelineModel([nn.Linear(3, 2), nn.Linear(2, 1)], stages_per_rank=2), {}),
        (net, {"task": Late()}),
        (net, {"strategy": Ddp()}),
        (net, {"precision": "bf16-true"}),
        (net, {"optimizer": lambda model: torch.optim.RMSprop(model.parameters())}),
        (net, {"optimizer": lambda model: (adamw(model),)}),
        (net, {"optimizer": hooked_step}),
    ],
)
def test_what_no_graph_can_hold_is_refused(model: Callable[[], nn.Module], given: dict[str, Any]) -> None:
    with refused(ArgumentError, "compile"):
        engine_of(model(), **given)


def test_hooks_within_an_update_are_refused_and_others_are_not() -> None:
    class Sees(Hook):
        def after_microbatch(self, event: Any) -> None: ...

    class Ends(Hook):
        def after_update(self, event: Any) -> None: ...

    check_hooks([Ends(), Statistics()])
    for hook in (Sees(), Statistics(gradient_norms=True)):
        with refused(ArgumentError, "compile"):
            check_hooks([hook])


def test_values_of_users_are_compared_at_each_call_and_modules_of_torch_are_not() -> None:
    torch.compiler.reset()
    kept: list[str] = []

    class Scaled:
        by = 2.0

    def choose(guards: Any) -> list[bool]:
        chosen = compilations.guards_kept(guards, ("held",))
        kept.extend(guard.name for guard, is_kept in zip(guards, chosen, strict=True) if is_kept)
        return chosen

    def scaled(held: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * Scaling.by + held[0])

    Scaling, own = Scaled(), cast("Any", {"guard_filter_fn": choose})
    compiled = torch.compile(scaled, backend="eager", fullgraph=True, options=own)
    one = torch.ones(1)
    first = compiled([one], one)
    Scaling.by = 3.0
    assert not torch.equal(compiled([one], one), first)
    assert not any(name.startswith(("held", "L['held']", "G['__import_torch")) for name in kept)
    compilations.keep_address([one])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True, maximize=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3),
    "decoupled": lambda p: Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "sgd": lambda p: SGD(p, lr=0.01, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, maximize=True),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in (3, 2)]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for size in (3, 2)]


def by_itself(optimizer: Optimizer, held: list[nn.Parameter], step: int, own: tuple[int, ...]) -> None:
    for number, (one, gradient) in enumerate(zip(held, gradients(step), strict=True)):
        one.grad = gradient if number in own else None
    optimizer.step()


def by_formula(
    state: OptimizerState, optimizer: Optimizer, held: list[nn.Parameter], step: int, own: tuple[int, ...]
) -> None:
    """A step by formulas; the first of a parameter is the optimizer's own."""
    state.follow()
    if state.lacks(own):
        by_itself(optimizer, held, step, own)
        state.read()
        return
    formulas, (rows, firsts) = state.formulas(own), state.rows(own)
    numbers = [torch.tensor(n, dtype=torch.float64) for one in firsts for n in state.numbers(one)]
    width = formulas[0].width
    for place, number in enumerate(own):
        kept = state.tensors(own)[place]
        row = numbers[rows[place] * width : (rows[place] + 1) * width]
        after, states = formulas[place].step(held[number].detach(), gradients(step)[number], kept, row)
        held[number].data.copy_(after)
        for old, new in zip(kept, states, strict=True):
            old.copy_(new)
    for count in state.counts(own):
        count.add_(1)
    state.committed(own)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_formula_is_the_optimizers_step_in_float64(name: str) -> None:
    expected, found = parameters(), parameters()
    optimizer, other = OPTIMIZERS[name](expected), OPTIMIZERS[name](found)
    state = OptimizerState(other)
    for step in range(8):
        own = (0, 1) if step % 3 else (0,)  # the second has its first gradient later, and not always
        by_itself(optimizer, expected, step, own)
        by_formula(state, other, found, step, own)
        other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
    for one, another in zip(expected, found, strict=True):
        assert torch.allclose(one, another, rtol=1e-12, atol=1e-14)
    kept, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert kept.keys() == theirs.keys()
    for number, one in kept.items():
        assert one.keys() == theirs[number].keys()
        for key, value in one.items():
            assert value is theirs[number][key] or torch.allclose(value, theirs[number][key], rtol=1e-12), key


def test_state_that_was_loaded_is_followed() -> None:
    held = parameters()
    optimizer = AdamW(held, lr=0.1)
    state = OptimizerState(optimizer)
    assert state.lacks((0,))
    by_formula(state, optimizer, held, 0, (0, 1))
    saved = deepcopy(optimizer.state_dict())
    by_formula(state, optimizer, held, 1, (0, 1))
    optimizer.load_state_dict(saved)
    by_formula(state, optimizer, held, 2, (0, 1))
    assert [float(one["step"]) for one in optimizer.state.values()] == [2.0, 2.0]
