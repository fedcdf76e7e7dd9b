"""Compiled runs from their beginning to their end: stopped and resumed, and in each number format.

Most tests let torch find its graphs and run them as they were found, which takes milliseconds; those that are slow let
its compiler make machine code of them.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, Ema, Engine, Hook, Loss, MapData, Task, Trainer, Training
from evenstep.contrib.compiled_update import compilations
from evenstep.contrib.compiled_update.update import CompiledUpdate
from evenstep.events import UpdateEvent
from evenstep.train import Committed

# torch's own, while it follows what it compiles
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

WIDTH, UPDATES = 8, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(nn.functional.gelu(self.inner(self.norm(x)))))


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Loss:
        return Loss(((output.squeeze(-1) - batch[1]) ** 2).sum())


class StopAfter(Hook):
    """Ends a run in its midst."""

    def __init__(self, update: int) -> None:
        self._update = update

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == self._update:
            raise RuntimeError("ended")


def chain(dropout: float = 0.0, *, blocks: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, WIDTH), *(Block(dropout) for _ in range(blocks)), nn.Linear(WIDTH, 1))


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return list(zip(torch.randn(8 * 10, 3, generator=generator), torch.randn(8 * 10, generator=generator), strict=True))


def trainer_of(folder: Path, compile: str, *hooks: Hook) -> Trainer:
    """Of updates of a micro-batch and a short one."""
    model = chain(dropout=0.3, blocks=2 if compile == "model" else 1)  # one graph for both, or all in one
    return Trainer(
        model=model,
        task=Squares(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=MapData(samples(), global_batch_size=8, micro_batch_size=5),
        updates=UPDATES,
        device="cpu",
        lr_schedule={"kind": "cosine", "warmup_updates": 3},
        train=Training(compile=compile, clip_norm=1.0, ema=Ema(decay=0.9, every_updates=2)),  # type: ignore[arg-type]
        checkpoint=Checkpointing(every_updates=3),
        hooks=[*hooks],
        folder=folder,
    )


def state_of(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state_dict()
    return {part: state[part] for part in ("model", "ema", "progress")} | {"optimizer": state["optimizer"]["state"]}


def tensors(tree: Any) -> list[Tensor]:
    """All tensors and numbers of a tree, in order."""
    if isinstance(tree, dict):
        return [one for value in tree.values() for one in tensors(value)]
    return [tree.double().flatten()] if isinstance(tree, Tensor) else [torch.tensor([float(hash(tree))]).double()]


def same_when_it_is_stopped(folder: Path, compile: str) -> None:
    straight = trainer_of(folder / "straight", compile)
    straight.train()
    with pytest.raises(RuntimeError, match="ended"):
        trainer_of(folder / "stopped", compile, StopAfter(5)).train()
    rmtree(folder / "stopped" / "checkpoints" / "step-00000005")  # which a process that is killed can't save
    torch.compiler.reset()  # as in a new process
    resumed = trainer_of(folder / "stopped", compile)
    resumed.resume()
    assert resumed.progress.update == 3
    resumed.train()
    assert torch.equal(torch.cat(tensors(state_of(resumed))), torch.cat(tensors(state_of(straight))))


@pytest.fixture
def as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are run as torch has found them."""
    torch.compiler.reset()
    compile = torch.compile

    def found(graph: Any, inputs: Any, **_: Any) -> Any:
        return graph.forward

    def compiled(forward: Any, *, backend: Any = found, options: Any = None, **given: Any) -> Any:
        own = options if backend is not found else None
        return compile(forward, backend=backend, options=own, **given)

    monkeypatch.setattr(compilations, "compile_graph", found)
    monkeypatch.setattr(torch, "compile", compiled)


@pytest.mark.usefixtures("as_found")
@pytest.mark.parametrize("compile", ["model", "update"])
def test_a_compiled_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(compile: str, tmp_path: Path) -> None:
    same_when_it_is_stopped(tmp_path, compile)


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["model", "update"])
def test_machine_code_that_was_stopped_ends_with_the_bits_of_that_which_was_not(compile: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    same_when_it_is_stopped(tmp_path, compile)


class Points(nn.Module):
    """Of which torch would not see, without looking at what the optimizer steps, that another one is other."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(5, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype)

    def forward(self, places: Tensor) -> Tensor:
        return self.last(self.table(places).tanh()).squeeze(-1)


class Sums(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output**2).sum()


def engine_of_points(width: int, dtype: torch.dtype, compile: str = "update") -> Engine:
    model = Points(width, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(model, Sums(), optimizer, device="cpu", train=Training(compile=compile))  # type: ignore[arg-type]


@pytest.mark.usefixtures("as_found")
def test_each_engine_of_a_process_has_graphs_of_its_own() -> None:
    for width, dtype in ((3, torch.float32), (4, torch.float32), (4, torch.float64)):
        compute = (engine := engine_of_points(width, dtype)).parts.compute
        assert isinstance(compute, CompiledUpdate)
        begun = compute.backend.graphs
        assert isinstance(engine.update(torch.arange(4)), Committed)
        assert compute.backend.graphs == begun + 1


@pytest.mark.usefixtures("as_found")
def test_an_update_in_another_thread_compiles_with_the_settings_of_the_engine() -> None:
    config: Any = import_module("torch._dynamo.config")
    engine = engine_of_points(3, torch.float32)

    def limit() -> int:
        engine.update(torch.arange(4))
        return config.recompile_limit

    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(limit).result() > 1000


def end_of(compile: str, precision: str, *, wide: bool = False) -> Tensor:
    """The parameters after UPDATES updates of two micro-batches; `wide`: in float64."""
    model = chain().double() if wide else chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # Adam blows up the rounding of small gradients
    train = Training(compile=compile, clip_norm=1.0)  # type: ignore[arg-type]
    engine = Engine(model, Squares(), optimizer, device="cpu", train=train, precision=precision)
    x, y = (torch.stack(part).to(next(model.parameters()).dtype) for part in zip(*samples(), strict=True))
    for update in range(UPDATES):
        rows = [slice(8 * update, 8 * update + 5), slice(8 * update + 5, 8 * update + 8)]
        assert isinstance(engine.update(microbatches=[(x[part], y[part]) for part in rows]), Committed)
    return torch.cat([one.detach().flatten() for one in model.parameters()]).double()


MIXED = {"bf16-mixed": 2.0**-8, "16-mixed": 2.0**-11}
"""The unit roundoff of what each multiplies in."""


def within_the_bound_of_its_format(precision: str) -> Tensor:
    """A gradient is rounded in at most 8 products and sums in a row: 8 u of the way, as in `proofs/rows/formats.py`."""
    begin = torch.cat([one.detach().flatten() for one in chain().parameters()]).double()
    wanted = end_of("off", "32-true", wide=True)
    found = end_of("update", precision)
    assert math.dist(found, wanted) <= 8 * MIXED[precision] * math.dist(wanted, begin)
    return found


@pytest.mark.usefixtures("as_found")
@pytest.mark.parametrize(
    "precision", [pytest.param(one, marks=[pytest.mark.slow] if one != "bf16-mixed" else []) for one in MIXED]
)
def test_updates_compiled_in_mixed_formats_are_those_that_are_not(precision: str) -> None:
    found, plain = within_the_bound_of_its_format(precision), end_of("off", precision)
    assert math.dist(found, plain) <= 1e-5 * math.hypot(*plain)  # the same roundings, but for float32's own


@pytest.mark.slow
@pytest.mark.parametrize("precision", MIXED)
def test_compiled_mixed_formats_stay_within_their_bound_and_repeat_their_bits(precision: str) -> None:
    torch.compiler.reset()
    found = within_the_bound_of_its_format(precision)
    torch.compiler.reset()
    assert torch.equal(end_of("update", precision), found)
