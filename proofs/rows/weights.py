"""Averages of parameters and checkpoints, teachers, loaded weights and what begins afresh, against references."""

import hashlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep import Ema, Hook, MapData, Task, Trainer, Training
from evenstep.checkpoint import average_checkpoints, export_weights, read_checkpoint
from evenstep.events import UpdateEvent
from evenstep.optim.schedules import Linear
from rows.row import Row

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "usage"))
UPDATES, DECAY, LR = 24, 0.9, 0.05


class Square(Task):
    """The squared distance to the label."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Taught(Square):
    """The distance to what the average gives as well."""

    uses_average = True

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch) + ((output - self.now.teacher(self.inputs(batch))) ** 2).sum()


class StopAt(Hook):
    """Ends the run after an update."""

    def __init__(self, update: int) -> None:
        self._update = update

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == self._update:
            self.trainer.request_stop("asked")


def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double()) for _ in range(24)
    ]


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def trainer_of(model: nn.Module, task: Task, folder: Path | None = None, **more: Any) -> Trainer:
    more.setdefault("updates", UPDATES)
    data = MapData(points(), global_batch_size=8, micro_batch_size=more.pop("micro_batch_size", 3), shuffle=False)
    return Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        data=data,
        device="cpu",
        folder=folder,
        train=Training(ema=Ema(decay=DECAY, decay_warmup=True)),
        log=evenstep.Logging(writers=()),
        **more,
    )


def plain(*, taught: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and their average after the same updates, in a few lines of torch."""
    model, average = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    x, y = (torch.stack([point[part] for point in points()]) for part in (0, 1))
    for update in range(1, UPDATES + 1):
        part = slice((update - 1) % 3 * 8, (update - 1) % 3 * 8 + 8)
        with torch.no_grad():
            other = average(x[part])
        output = model(x[part])
        loss = ((output - y[part]) ** 2).sum() + (((output - other) ** 2).sum() if taught else 0)
        optimizer.zero_grad()
        (loss / 8).backward()
        optimizer.step()
        decay = min(DECAY, (1 + update) / (10 + update))
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.copy_(decay * old + (1 - decay) * new)
    return list(model.parameters()), list(average.parameters())


def furthest(state: dict[str, Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b.detach()).abs().max()) for a, b in zip(state.values(), wanted, strict=True))


def averaged(micro_batch_size: int, *, taught: bool) -> tuple[float, float]:
    """How far an average is from the plain loop's."""
    trainer = trainer_of(network(), Taught() if taught else Square(), micro_batch_size=micro_batch_size)
    trainer.train()
    return furthest(trainer.state_dict()["ema"], plain(taught=taught)[1]), 1e-12


def averaged_on_ranks(strategy: str, pipeline: int) -> tuple[float, float]:
    """The same on two ranks that share the model."""
    import averages_programs
    from launched import on_ranks

    first, *_ = on_ranks(2, averages_programs.averaged, strategy, pipeline)
    if not isinstance(first, dict):
        raise RuntimeError(first)
    found = {name: torch.tensor(one, dtype=torch.float64) for name, one in first.items()}
    return furthest(found, averages_programs.averaged_plainly()), 1e-12


def of_checkpoints() -> tuple[float, float]:
    """How far the mean of checkpoints, exported and loaded again, is from that in float64."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        checkpoint = evenstep.Checkpointing(every_updates=6, keep_last=None)
        trainer_of(network(), Square(), run, checkpoint=checkpoint).train()
        of = sorted((run / "checkpoints").glob("step-*"))
        made = average_checkpoints(of, run / "averages")
        export_weights(made, run / "out" / "model.safetensors")
        model = network(2)
        evenstep.load_weights(model, run / "out")
        states = [read_checkpoint(path).state["model"] for path in of]
        wanted = [torch.stack([state[name] for state in states]).sum(0) / len(states) for name in states[0]]
        return furthest(model.state_dict(), wanted), 1e-15


def digest(trainer: Trainer) -> str:
    state, total = trainer.state_dict(), hashlib.sha256()
    for part in (state["model"], state["ema"], *state["optimizer"]["state"].values()):
        for tensor in part.values():
            total.update(tensor.numpy().tobytes() if isinstance(tensor, Tensor) else repr(tensor).encode())
    return total.hexdigest()


def afresh() -> tuple[str, str]:
    """sha256 of a run with all begun afresh from a checkpoint, stopped and gone on with, and straight."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first"
        trainer_of(network(), Square(), first, updates=6).train()
        for name, stop in (("stopped", 13), ("straight", 0)):
            more: dict[str, Any] = {"lr_schedule": Linear(warmup_updates=3)}
            trainer = trainer_of(network(), Square(), Path(folder) / name, hooks=[StopAt(stop)], **more)
            trainer.resume(first, reset=("optimizer", "lr_schedule", "metrics", "data"), new_settings=True)
            trainer.train()
            if stop:
                trainer = trainer_of(network(), Square(), Path(folder) / name, **more)
                trainer.resume()
                trainer.train()
            found.append(digest(trainer))
    return found[0], found[1]


ROWS = [
    *(
        Row(
            name=f"average {what}, micro-batches of {size}",
            measure="max |a - b| of averages, float64",
            run=partial(averaged, size, taught=taught),
        )
        for what, taught in (("of parameters, decay warmed up", False), ("that teaches", True))
        for size in (1, 3, 8)
    ),
    *(
        Row(
            name=f"average of parameters, {name}",
            measure="max |a - b| of averages, float64",
            run=partial(averaged_on_ranks, strategy, pipeline),
        )
        for name, strategy, pipeline in (("2 ranks with fsdp", "fsdp", 1), ("2 stages", "ddp", 2))
    ),
    Row(name="average of checkpoints, exported, loaded", measure="max |a - b| of weights, float64", run=of_checkpoints),
    Row(name="load with all begun afresh, stopped", measure="sha256 of all that training changes", run=afresh),
]
