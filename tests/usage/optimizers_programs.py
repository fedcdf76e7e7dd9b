"""What ranks run for the battery of optimizers: all optimizers and layouts of so many ranks, one after another."""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from optimizers import CASES, LAYOUTS, Case, Layout
from torch import Tensor, nn

from evenstep import Checkpointing, Logging, MapData, Task, Trainer
from evenstep.errors import ArgumentError
from evenstep.optim.schedules import InverseSqrt
from evenstep.parallel import Group, Mesh, Single
from evenstep.pipeline import Layers, PipelineModel

UPDATES, STOP = 4, 2


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1)]


def data(case: Case) -> MapData:
    """Of two micro-batches per update: all orders of summation are then the same."""
    draw = torch.Generator().manual_seed(1)
    inputs = [
        torch.randint(7, (3,), generator=draw) if case.sparse else torch.randn(5, generator=draw) for _ in range(24)
    ]
    points = [(x, torch.randn(1, generator=draw)) for x in inputs]
    return MapData(points, global_batch_size=8, micro_batch_size=4)


@cache
def mesh_of(world: Group | None, stages: int) -> Mesh:
    """The ranks laid out; made once, as each makes new connections."""
    return Mesh() if world is None else Mesh.of(world, pipeline=stages)


def build(case: Case, layout: Layout, world: Group | None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    mesh = mesh_of(world, layout.stages)
    group = None if world is None else mesh.data
    if case.sparse:
        model: nn.Module = nn.EmbeddingBag(7, 1, mode="sum", sparse=True)
    elif layout.stages > 1:
        model = PipelineModel(Layers.of(layers()), mesh=mesh, schedule="1f1b")
    else:
        model = nn.Sequential(*layers())
    strategy = Single(group) if layout.stages > 1 and mesh.data.ranks == 1 else strategy_named(layout.strategy, group)
    return Trainer(
        model=model,
        task=Square(),
        optimizer=case.build(model),
        data=data(case),
        evaluations={"valid": data(case)},
        device="cpu",
        strategy=strategy,
        lr_schedule=InverseSqrt(warmup_updates=2),
        checkpoint=Checkpointing(asynchronous=False),
        log=Logging(writers=()),
        **more,
    )


def ended(trainer: Trainer) -> tuple[str, float, list[float]]:
    """A digest of the parameters and the optimizer's state, what the evaluation gave, and the parameters' values."""
    loss = trainer.train().metrics["valid/loss"]
    state: Any = trainer.state_dict()
    kept = state["optimizer"]
    values = [float(value) for tensor in state["model"].values() for value in tensor.flatten()]
    return digest([state["model"], kept.get("state"), kept.get("beside")]), loss, values


def run(case: Case, layout: Layout, world: Group | None, folder: Path) -> tuple[str, Any, Any]:
    """("ran", the run through, the run stopped and resumed), or ("refused", message, "")."""
    try:
        whole = build(case, layout, world, updates=UPDATES)
    except ArgumentError as error:
        return "refused", str(error), ""
    through = ended(whole)
    build(case, layout, world, updates=STOP, folder=folder).train()
    return "ran", through, gone_on(case, layout, world, folder)


def gone_on(case: Case, layout: Layout, world: Group | None, folder: Path) -> Any:
    again = build(case, layout, world, updates=UPDATES)
    again.resume(folder)
    return ended(again)


def battery(cases: Sequence[str], layouts: Sequence[str]) -> dict[tuple[str, str], Any]:
    """What each optimizer came to on each layout; the layouts must be of as many ranks as there are."""
    world = group_of_ranks(timeout_s=120)
    found: dict[tuple[str, str], Any] = {}
    with shared_folder(world) as folder:
        for name in cases:
            for layout in layouts:
                place = Path(folder) / f"{len(found)}"
                try:
                    found[name, layout] = run(CASES[name], LAYOUTS[layout], world, place)
                except Exception as error:  # noqa: BLE001 - one optimizer's failure must not hide the others
                    found[name, layout] = "failed", f"{type(error).__name__}: {error}", ""
    if world is not None:
        world.close()
    return found


def moved(cases: Sequence[str], moves: Sequence[tuple[str, str]]) -> dict[tuple[str, str, str], Any]:
    """What each optimizer came to when it was stopped on one layout of two ranks and went on on another."""
    world = group_of_ranks(timeout_s=120)
    found: dict[tuple[str, str, str], Any] = {}
    with shared_folder(world) as folder:
        for name in cases:
            for before, after in moves:
                place = Path(folder) / f"{len(found)}"
                build(CASES[name], LAYOUTS[before], world, updates=STOP, folder=place).train()
                found[name, before, after] = gone_on(CASES[name], LAYOUTS[after], world, place)
    if world is not None:
        world.close()
    return found


class shared_folder:
    """A folder that all ranks use, which the first makes and removes."""

    def __init__(self, world: Group | None) -> None:
        self._made = tempfile.TemporaryDirectory() if world is None or world.rank == 0 else None
        mine = "" if self._made is None else self._made.name
        self._name = mine if world is None else world.gather(mine)[0]
        self._world = world

    def __enter__(self) -> str:
        return self._name

    def __exit__(self, *_: object) -> None:
        if self._world is not None:
            self._world.gather(None)
        if self._made is not None:
            self._made.cleanup()
