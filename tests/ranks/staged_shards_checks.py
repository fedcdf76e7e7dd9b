"""What four real processes do as 2 pipeline ranks × 2 replicas whose state is shared out.

`test_staged_shards.py` starts them and reads what they print. Each check returns what is to be compared; ranks run all
of them in one process, and each compares with the same run made by itself alone.
"""

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Ema, Logging, MapData, Mixture, Task, Trainer, Training
from evenstep.checkpoint import verify
from evenstep.data import RoundRobin
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Fsdp, Mesh, Processes, Strategy, Zero1
from evenstep.pipeline import Layers, PipelineModel

UPDATES = 2  # of five micro-batches, and of four
FOLDER = Path()
MESH = Mesh()
NOT_COMPARED: dict[str, Any] = {}


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class OfHead(Square):
    def __init__(self, head: int) -> None:
        self.head = head

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output[self.head], batch)


def points(count: int = 18) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, generator=generator), torch.tensor(float(n % 3))) for n in range(count)]


class Heads(nn.Module):
    """Three heads, of which a task uses one, and a number that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.heads = nn.ModuleList([nn.Linear(3, 1) for _ in range(3)])
        self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def layers(*, last: nn.Module | None = None, tied: bool = False) -> Layers:
    torch.manual_seed(7)
    made: list[nn.Module] = []
    for _ in range(4):
        made += [nn.Linear(3, 3), nn.Tanh()]
    made += [nn.LayerNorm(3), last or nn.Linear(3, 1)]
    return Layers(Layers.of(made).layers, ties=(("0.weight", "2.weight", "6.weight"),) if tied else ())


adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True)
# torch plans fewer operations over shards for it: for what does not depend on the optimizer
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def trainer(strategy: type[Strategy] | Any, *, mesh: Mesh | None = None, **more: Any) -> Trainer:
    mesh = mesh or Mesh()
    schedule, tied, last = more.pop("schedule", "1f1b"), more.pop("tied", False), more.pop("last", None)
    model = PipelineModel(more.pop("model", None) or layers(tied=tied, last=last), mesh=mesh, schedule=schedule)
    options: dict[str, Any] = {
        "task": Square(),
        "data": MapData(points(), global_batch_size=10, micro_batch_size=2),  # 5 micro-batches, then 4
        "updates": UPDATES,
        "train": Training(clip_norm=0.5, ema=Ema(decay=0.9), check_loss=more.pop("check_loss", False)),
        "log": Logging(writers=()),
    }
    return Trainer(
        model=model,
        optimizer=more.pop("optimizer", momentum)(model.parameters()),
        device="cpu",
        strategy=strategy(mesh.data),
        **(options | more),
    )


def trained(strategy: Any, *, mesh: Mesh | None = None, **more: Any) -> dict[str, Any]:
    """What is there at the end. Of one process only the first rank of all has it, which compares."""
    if mesh is None and MESH.world.rank:
        return NOT_COMPARED
    one = trainer(strategy, mesh=mesh, **more)
    one.train()
    return one.state_dict()


@cache
def alone(tied: bool = False, micro: int = 2, optimizer: Any = momentum) -> dict[str, Any]:
    data = MapData(points(), global_batch_size=10, micro_batch_size=micro)
    return trained(Ddp, tied=tied, optimizer=optimizer, data=data)


def same(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor):
        return torch.equal(mine, other)
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(same(mine[name], other[name]) for name in mine)
    return mine == other


def equal(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    if other is NOT_COMPARED:
        return False
    parts = ("model", "ema", "progress")
    states = mine["optimizer"]["state"], other["optimizer"]["state"]
    return all(same(mine[part], other[part]) for part in parts) and same(*states)


def near(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """Of what this rank has: the first has all, and it is the first that prints."""
    if other is NOT_COMPARED:
        return 0.0
    pairs = [(value.double(), other["model"][name].double()) for name, value in mine["model"].items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def zero1(group: Any) -> Strategy:
    return Zero1(group)


def shards_have_the_bits_of_one_process() -> object:
    ways = [
        (Fsdp, "1f1b", adamw),
        (Fsdp, "zb_v", momentum),
        (Fsdp, "interleaved", momentum),
        (zero1, "zb_h1", adamw),
    ]
    return [
        equal(
            trained(context, mesh=MESH, schedule=schedule, optimizer=optimizer, check_loss=True),
            alone(optimizer=optimizer),
        )
        for context, schedule, optimizer in ways
    ]


def tied_shards_have_the_bits_of_one_process() -> object:
    return [equal(trained(context, mesh=MESH, tied=True), alone(tied=True)) for context in (Fsdp, zero1)]


def fast_sums_are_equal_up_to_rounding() -> object:
    ways = [
        (partial(Fsdp, reduction="fast"), "1f1b"),
        (Fsdp, "zb_h1"),
        (lambda group: Zero1(group, reduction="fast"), "interleaved"),
    ]
    return [near(trained(context, mesh=MESH, schedule=schedule), alone()) < 1e-6 for context, schedule in ways]


def copies_of_shards_are_one_replica_each() -> object:
    def hybrid(kind: Any) -> Any:
        return lambda group: kind(group, shard_ranks=1)

    exact = equal(trained(hybrid(Fsdp), mesh=MESH), alone())
    return exact, near(trained(hybrid(Fsdp), mesh=MESH), alone()) < 1e-6


def a_replica_without_work_takes_part() -> object:
    """Two micro-batches, then one: the second replica has one, then none."""
    more: dict[str, Any] = {"data": MapData(points(), global_batch_size=10, micro_batch_size=8)}
    wanted = alone(micro=8)
    return equal(trained(Fsdp, mesh=MESH, **more), wanted), near(trained(Fsdp, mesh=MESH, **more), wanted) < 1e-6


def sixteen_bit_parameters_train() -> object:
    ways = [(partial(Fsdp, reduction="fast"), "1f1b"), (Fsdp, "zb_h1"), (Fsdp, "zb_h1")]
    return [0 < near(trained(kind, mesh=MESH, schedule=s, precision="bf16-true"), alone()) < 0.05 for kind, s in ways]


def metrics_and_evaluations_are_those_of_one_process() -> object:
    more: dict[str, Any] = {
        "evaluations": {"valid": MapData(points(8), global_batch_size=4, micro_batch_size=2, shuffle=False)},
        "optimizer": momentum,
    }
    ours, theirs = (trainer(kind, mesh=mesh, **more) for kind, mesh in ((Fsdp, MESH), (Ddp, None)))
    return ours.train().metrics == theirs.train().metrics


def a_checkpoint_in_shards_goes_on_anywhere() -> object:
    """pp 2 × fsdp 2, then one process, then pp 4, then fsdp 4; and pp 2 × zero1 2 from there."""
    single, flat, deep = Mesh(), Mesh.of(MESH.world), Mesh.of(MESH.world, pipeline=4)

    def go_on(strategy: Any, mesh: Mesh, updates: int) -> dict[str, Any]:
        one = trainer(strategy, mesh=mesh, updates=updates, folder=FOLDER / "moved", tied=True)
        one.resume("auto")
        one.train()
        return one.state_dict()

    go_on(Fsdp, MESH, 2)
    found = verify(FOLDER / "moved" / "checkpoints" / "step-00000002").ranks
    if MESH.world.rank == 0:
        go_on(Ddp, single, 3)
    MESH.world.gather(None)
    for strategy, mesh, updates in ((Ddp, deep, 4), (Fsdp, flat, 5), (zero1, MESH, 6)):
        state = go_on(strategy, mesh, updates)
    return found, equal(state, trained(Ddp, tied=True, updates=6))


def heads_without_work_keep_their_bits() -> object:
    """Every update has all tasks, then one at a time: heads and what no task uses stay as they are."""

    def run(strategy: Any, mesh: Mesh | None = None) -> dict[str, Any]:
        sizes = {"a": 8, "b": 6, "c": 2}
        data = {name: MapData(points(), global_batch_size=size, micro_batch_size=2) for name, size in sizes.items()}
        tasks = {name: OfHead(head) for head, name in enumerate(sizes)}
        valid = {"valid": Mixture(data, end="max")}
        one = trainer(
            strategy,
            mesh=mesh,
            last=Heads(),
            optimizer=adamw,  # whose decay would move a head without work
            task=tasks,
            data=Mixture(data, mixing=RoundRobin()),
            evaluations=valid,
            updates=4,  # the first head has work again after two without
        )
        one.train()
        return one.state_dict() | {"valid": one.evaluate()["valid"]}

    wanted, ours = run(Ddp), run(Fsdp, MESH)
    assert not any("spare" in name for name in wanted["optimizer"]["state"])
    return equal(ours, wanted) and same(ours["valid"], wanted["valid"])


class Strikes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.act()
        return gradients[0], None


class Full(nn.Linear):
    """A last layer that runs out of memory once, at its third forward or backward."""

    def __init__(self, phase: str) -> None:
        super().__init__(3, 1)
        self.phase, self.calls = phase, 0
        with torch.no_grad():
            # unequal: the sum of what a LayerNorm gives is constant, so equal ones would let no gradient through, and
            # AdamW would make steps of the rounding errors that are left
            self.weight.copy_(torch.tensor([[0.3, -0.2, 0.5]]))
            self.bias.fill_(0.1)

    def strike(self, phase: str) -> None:
        self.calls += phase == self.phase
        if phase == self.phase and self.calls == 3:
            raise MemoryError("injected")

    def forward(self, input: Tensor) -> Tensor:
        self.strike("forward")
        return Strikes.apply(super().forward(input), partial(self.strike, "backward"))


def memory_that_runs_out_in_a_stage_in_shards_changes_no_gradient() -> object:
    return _runs_out([(Fsdp, "1f1b", "forward"), (Fsdp, "zb_h1", "backward")])


def _runs_out(ways: list[tuple[Any, str, str]]) -> bool:
    """On one of the two last stages; the other replica begins anew with it."""
    found, wanted = list[float](), trained(Ddp, last=Full(""), optimizer=momentum)
    hit = MESH.world.gather(MESH.pipeline.rank == 1 and MESH.data.rank == 1).index(True)
    for kind, schedule, phase in ways:
        last = Full(phase if MESH.world.rank == hit else "")
        one = trainer(kind, mesh=MESH, schedule=schedule, last=last, optimizer=momentum, check_loss=True)
        one.train()
        assert MESH.world.gather(last.calls)[hit] > 3
        found.append(near(one.state_dict(), wanted))
    return max(found) < 1e-6


def a_fused_optimizer_is_refused_where_bits_must_be_equal() -> object:
    model = PipelineModel(layers(), mesh=MESH)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        Trainer(
            model=model,
            task=Square(),
            optimizer=optimizer,
            data=MapData(points(), global_batch_size=10),
            updates=1,
            device="cpu",
            strategy=Fsdp(MESH.data),
        )
    except ArgumentError as error:
        return "foreach=True" in str(error)
    return "not refused"


def a_model_without_stages_is_refused_the_ranks_of_one_column() -> object:
    """They would train it apart from the other column."""
    model = nn.Linear(3, 1)
    try:
        Trainer(
            model=model,
            task=Square(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=MapData(points(), global_batch_size=10),
            updates=1,
            device="cpu",
            strategy=Ddp(MESH.data, reduction="fast"),
        )
    except ArgumentError as error:
        return error.field == "strategy"
    return False


def main() -> None:
    global FOLDER, MESH
    torch.set_num_threads(1)
    world = Processes(torch.device("cpu"), timeout_s=60)
    FOLDER, MESH = Path(sys.argv[1]), Mesh.of(world, pipeline=2)
    found = {name: globals()[name]() for name in sys.argv[2:]}
    if world.rank == 0:
        print(json.dumps(found))
    world.gather(None)
    world.close()


if __name__ == "__main__":
    main()
