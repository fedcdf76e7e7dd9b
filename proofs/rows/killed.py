"""A run that can be killed at any micro-batch: `python killed.py FOLDER WORKERS [UPDATE MICROBATCH]`.

Dropout, BatchNorm, shuffling, random augmentation, warm-up, EMA, evaluation in between, several epochs. It goes on from
the newest checkpoint in FOLDER, kills itself with SIGKILL at (UPDATE, MICROBATCH) if told to, and prints the sha256 of
everything that training changes when it reaches its end.
"""

import hashlib
import os
import signal
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import evenstep
from evenstep.events import Evaluate, Save
from evenstep.optim.schedules import Linear

UPDATES = 23


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """90 noisy points; the noise is drawn anew each time one is read."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 8) * (index % 7) + 0.1 * torch.randn(8)
        return x, torch.tensor(index % 3)


class Classify(evenstep.Task):
    def loss(self, output: Any, batch: Any) -> evenstep.Loss:
        return evenstep.Loss(functional.cross_entropy(output, batch[1], reduction="sum"))


class KillAt(evenstep.Hook):
    """Kills the process, without a chance to tidy up."""

    def __init__(self, update: int, microbatch: int) -> None:
        self._at = (update, microbatch)

    def before_backward(self, event: evenstep.events.MicrobatchEvent) -> None:
        if (event.update, event.microbatch) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(tree: object) -> str:
    """sha256 over all tensors and numbers of a state, in order."""
    total = hashlib.sha256()

    def walk(node: object) -> None:
        if isinstance(node, Tensor):
            total.update(node.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(node, dict):
            for name, value in cast("dict[object, object]", node).items():
                total.update(str(name).encode())
                walk(value)
        elif isinstance(node, list | tuple):
            for value in cast("list[object]", node):
                walk(value)
        else:
            total.update(repr(node).encode())

    walk(tree)
    return total.hexdigest()


def main(folder: str, workers: int, kill_at: tuple[int, int] | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
    trainer = evenstep.Trainer(
        model=model,
        task=Classify(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        data=evenstep.MapData(Points(), global_batch_size=16, micro_batch_size=4, num_workers=workers),
        updates=UPDATES,
        seed=3,
        device="cpu",
        lr_schedule=Linear(warmup_updates=8),
        train=evenstep.Training(clip_norm=1.0, ema=evenstep.Ema(decay=0.9, decay_warmup=False)),
        evaluations={"valid": evenstep.MapData(Points(), global_batch_size=32, shuffle=False)},
        hooks=[Evaluate(every_updates=3), Save(every_updates=4), None if kill_at is None else KillAt(*kill_at)],
        folder=folder,
        log=evenstep.Logging(writers=()),
    )
    trainer.resume("auto")
    trainer.train()
    state = trainer.state_dict()
    print(digest([state["model"], state["optimizer"]["state"], state["ema"], state["progress"], state["storage"]]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 3 else None)
