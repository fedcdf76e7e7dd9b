"""What four real processes do as 2 pipeline ranks × 2 replicas whose state is shared out.

`test_staged_shards.py` starts them and reads what they print. Each check returns what is to be compared; ranks run all
of them in one process, and each compares with the same run made by itself alone.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import Ema, Logging, MapData, Mixture, Task, Trainer, Training
from evenstep.data import RoundRobin
from evenstep.errors import ArgumentError
from evenstep.parallel import Ddp, Fsdp, Mesh, Processes, Strategy
from evenstep.pipeline import Layers, PipelineModel

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


def layers(last: nn.Module | None) -> Layers:
    torch.manual_seed(7)
    made: list[nn.Module] = []
    for _ in range(4):
        made += [nn.Linear(3, 3), nn.Tanh()]
    return Layers.of([*made, nn.LayerNorm(3), last or nn.Linear(3, 1)])


def trainer(strategy: type[Strategy] | Any, *, mesh: Mesh | None = None, **more: Any) -> Trainer:
    mesh = mesh or Mesh()
    model = PipelineModel(layers(more.pop("last", None)), mesh=mesh, schedule=more.pop("schedule", "1f1b"))
    options: dict[str, Any] = {
        "task": Square(),
        "data": MapData(points(), global_batch_size=10, micro_batch_size=2),  # 5 micro-batches, then 4
        "updates": 2,
    }
    return Trainer(
        model=model,
        # the decay would move a head without work
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=True),
        device="cpu",
        strategy=strategy(mesh.data),
        train=Training(clip_norm=0.5, ema=Ema(decay=0.9), check_loss=False),
        log=Logging(writers=()),
        **(options | more),
    )


def trained(strategy: Any, *, mesh: Mesh | None = None, **more: Any) -> dict[str, Any]:
    """What is there at the end. Of one process only the first rank of all has it, which compares."""
    if mesh is None and MESH.world.rank:
        return NOT_COMPARED
    one = trainer(strategy, mesh=mesh, **more)
    one.train()
    return one.state_dict()


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


def sixteen_bit_parameters_train() -> object:
    ways = [(partial(Fsdp, reduction="fast"), "1f1b"), (Fsdp, "zb_h1")]
    alone = trained(Ddp)
    return [0 < near(trained(kind, mesh=MESH, schedule=s, precision="bf16-true"), alone) < 0.05 for kind, s in ways]


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
    global MESH
    torch.set_num_threads(1)
    world = Processes(torch.device("cpu"), timeout_s=60)
    MESH = Mesh.of(world, pipeline=2)
    found = {name: globals()[name]() for name in sys.argv[2:]}  # the first is a folder, which nothing here needs
    if world.rank == 0:
        print(json.dumps(found))
    world.gather(None)
    world.close()


if __name__ == "__main__":
    main()
