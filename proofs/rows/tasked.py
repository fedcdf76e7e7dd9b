"""One rank of a run of three tasks: `python tasked.py FOLDER STRATEGY UPDATES WEIGHTS`; RANK, WORLD_SIZE as torchrun.

K batches per task and update, of unequal sizes and weights, cut into micro-batches of 2, so that of four ranks some
have no work for a task. Task c takes part in the first updates only. It goes on from the newest checkpoint in FOLDER.
Rank 0 writes the parameters and what the optimizer keeps of the idle head to FOLDER/parameters.pt, and prints the
sha256 of all that training changes.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import evenstep
from evenstep import Logging
from evenstep.data import Mixing
from evenstep.parallel import Ddp, Fsdp, Group, Processes, Single, Strategy
from rows.killed import digest

LATE: dict[str, str] = {"per token": "", "per token, late": "c"}  # the task whose weight is known after the forward
SIZES, REPEATS = {"a": 6, "b": 4, "c": 3}, {"a": 1, "b": 2, "c": 3}
COEFFICIENTS = {"a": 1.0, "b": 0.25, "c": 3.0}
SAMPLES, UPDATES, LAST_OF_C = 60, 20, 12
STRATEGIES: dict[str, Callable[[Group], Strategy]] = {
    "single": Single,
    "ordered": Ddp,
    "ddp": partial(Ddp, reduction="fast"),
    "fsdp": partial(Fsdp, reduction="fast"),
}

Sample = tuple[Tensor, Tensor, Tensor]


def samples(place: int) -> list[Sample]:
    """Inputs, values and weights 0, 1, 2, … of the task at this place, in float64."""
    generator = torch.Generator().manual_seed(place)
    return [
        (
            torch.randn(5, generator=generator, dtype=torch.float64),
            torch.randn((), generator=generator, dtype=torch.float64),
            torch.tensor(float(number % 4), dtype=torch.float64),
        )
        for number in range(SAMPLES)
    ]


class Heads(nn.Module):
    """A trunk and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 12), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(12, 1) for name in SIZES})

    def forward(self, x: Tensor, head: str) -> Tensor:
        return self.heads[head](self.trunk(x)).squeeze(-1)


def model() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


class Regress(evenstep.Task):
    """Weighted squared errors of one head."""

    def __init__(self, head: str, *, late: bool) -> None:
        self.head, self.late_weight = head, late

    def inputs(self, batch: Any) -> Any:
        return {"x": batch[0], "head": self.head}

    def weight(self, batch: Any) -> Tensor:
        return batch[2].sum()

    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        total = (batch[2] * (output - batch[1]) ** 2).sum()
        return evenstep.Loss(total, weight=self.weight(batch) if self.late_weight else None)


class Ends(Mixing):
    """All tasks, c in the first updates only."""

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        return [name for name in sizes if name != "c" or number < LAST_OF_C for _ in range(REPEATS[name])]

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "ends"}


def adamw(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=3e-3)


def trainer_of(trained: nn.Module, strategy: Strategy, updates: int, weights: str, **more: Any) -> evenstep.Trainer:
    data = {
        name: evenstep.MapData(samples(place), global_batch_size=size, micro_batch_size=2, shuffle=False)
        for place, (name, size) in enumerate(SIZES.items())
    }
    return evenstep.Trainer(
        model=trained,
        task={name: Regress(name, late=name == LATE[weights]) for name in SIZES},
        optimizer=adamw(trained),
        data=evenstep.Mixture(data, mixing=Ends()),
        updates=updates,
        device="cpu",
        strategy=strategy,
        train=evenstep.Training(clip_norm=0.5, coefficients=COEFFICIENTS),
        **more,
    )


def main(folder: Path, strategy: str, updates: int, weights: str) -> None:
    torch.set_num_threads(1)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    group = Processes(torch.device("cpu"), timeout_s=60) if several else Group()
    trained = model()
    trainer = trainer_of(trained, STRATEGIES[strategy](group), updates, weights, folder=folder, log=Logging(writers=()))
    trainer.resume("auto")
    trainer.train()
    state = trainer.state_dict()
    if group.rank == 0:
        idle = [value for name, value in state["model"].items() if name.startswith("heads.c")]
        kept = [value for name, value in state["optimizer"]["state"].items() if name.startswith("heads.c")]
        parameters = [state["model"][name].flatten() for name, _ in trained.named_parameters()]
        torch.save(torch.cat(parameters), folder / "parameters.pt")
        print(digest([idle, kept]))
        print(digest([state["model"], state["optimizer"]["state"], state["progress"]]))
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *cast("Any", (sys.argv[2], int(sys.argv[3]), sys.argv[4])))
