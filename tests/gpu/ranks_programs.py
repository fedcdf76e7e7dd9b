"""What the ranks of the tests run: updates of the small network on whatever device they are given."""

import os
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from work import SIDE, Mean, Small, Squares, Waves, batches, flat, in_blocks, network, precision_of, sha256, wide_batch

from evenstep import Engine, Training
from evenstep.parallel import Ddp, Fsdp, Group, Mesh, Processes, Single, Strategy, Zero1
from evenstep.pipeline import PipelineModel

KINDS: dict[str, Any] = {
    "ddp": partial(Ddp, reduction="fast"),
    "ordered": Ddp,
    "zero1": lambda group: Zero1(group, reduction="fast"),
}
UPDATES, MICROBATCHES = 4, 8
ROOM = 600 << 20  # bytes: of what `Waves` needs, less than all and more than half


def _group(name: str) -> Group:
    return Processes(name, timeout_s=60) if os.environ.get("WORLD_SIZE") else Group()


def trained(
    name: str,
    strategy: str,
    stages: int = 1,
    precision: str = "32-true",
    dropout: float = 0.1,
    compile: Literal["off", "model", "update"] = "off",
) -> tuple[str, list[float]]:
    """What a run on these ranks, or with so many of them as stages, ends with: its sha256 and its parameters."""
    world = _group(name)
    model: Any = network(dropout=dropout)
    group, mine, others = world, world.rank, world.ranks
    if stages > 1:
        mesh = Mesh.of(world, pipeline=stages)
        model = PipelineModel(model, mesh=mesh)
        group, mine, others = mesh.data, mesh.data.rank, mesh.data.ranks
    engine = _engine(name, model, KINDS[strategy](group), precision, compile)
    for _ in range(UPDATES):
        some = batches(MICROBATCHES)
        share = MICROBATCHES // others
        engine.update(microbatches=some[mine * share : (mine + 1) * share])
    state = engine.state_dict()["model"]
    world.gather(None)
    ended = (sha256(state), flat(model).tolist()) if world.rank == 0 else ("", [])
    world.close()
    return ended


def compiled_in_stages(name: str, stages: int) -> str:
    """The sha256 that a run of compiled blocks ends with on as many ranks as stages."""
    world = _group(name)
    mesh = Mesh.of(world, pipeline=stages)
    engine = Engine(
        model := PipelineModel(in_blocks(), mesh=mesh),
        Squares(),
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        strategy=Ddp(mesh.data),
        device=name,
        train=Training(clip_norm=1.0, check_loss=False, compile="model"),
    )
    for _ in range(UPDATES):
        engine.update(microbatches=batches(MICROBATCHES))
    ended = sha256(engine.state_dict()["model"])
    world.gather(None)
    world.close()
    return ended


def starved(name: str, starves: bool) -> tuple[list[float], int | None]:
    """What two updates end with on ranks of which the first has room for half of its samples, if it `starves`."""
    group = Processes(name, timeout_s=60)
    first, is_cuda = starves and group.rank == 0, name == "cuda"
    model = Waves() if is_cuda else Small(SIDE // 2 if first else SIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = Training(check_loss=False)
    engine = Engine(model, Mean(), optimizer, strategy=Ddp(group, reduction="fast"), device=name, train=train)
    if is_cuda and first:
        room = ROOM / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(room)
    for update in range(2):
        engine.update(wide_batch(2 * update + group.rank))
    group.gather(None)
    ended = flat(model).tolist(), engine.parts.context.cuts.limit
    group.close()
    return ended


def _engine(name: str, model: Any, strategy: Strategy, precision: str = "32-true", compile: Any = "off") -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    train = Training(clip_norm=1.0, check_loss=False, compile=compile)
    return Engine(
        model,
        Squares(),
        optimizer,
        strategy=strategy,
        precision=precision_of(precision, torch.device(name)),
        device=name,
        train=train,
    )


def sharded(name: str) -> str:
    group = Processes(name, timeout_s=60)
    model = network()
    try:
        engine = _engine(name, model, Fsdp(group, reduction="fast"))
        engine.update(microbatches=batches(2))
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    finally:
        group.close()
    return "trained"


def alone(name: str, strategy: str) -> list[Any]:
    """A process group of one rank, whose collectives go through the device's own backend."""
    group = Processes(name, timeout_s=60)
    made: dict[str, Any] = {**KINDS, "fsdp": partial(Fsdp, reduction="fast")}
    model = network()
    engine = _engine(name, model, made[strategy](group))
    for _ in range(UPDATES):
        engine.update(microbatches=batches(MICROBATCHES))
    state = engine.state_dict()["model"]
    ended = [sha256({name: _whole(value) for name, value in state.items()})]
    one = torch.full((3,), 2.0, device=group.device)
    group.begin_work()
    group.interrupt("a test")
    ended.append(group.meet("here"))  # the connections are new
    group.sum(one)()
    group.broadcast([one])
    ended += [one.tolist(), str(group.device)]
    group.close()
    return ended


def _whole(value: Tensor) -> Tensor:
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def single(name: str) -> str:
    engine = _engine(name, network(), Single(reduction="fast"))
    for _ in range(UPDATES):
        engine.update(microbatches=batches(MICROBATCHES))
    return sha256(engine.state_dict()["model"])
