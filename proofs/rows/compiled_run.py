"""A run that torch compiles: `python compiled_run.py FOLDER COMPILE PRECISION [UPDATE MICROBATCH]`.

COMPILE is "model" or "update". Two micro-batches in each update, dropout, BatchNorm, an average,
clipping, warm-up, evaluation and saves in between. It goes on from the newest checkpoint in FOLDER, kills itself with
SIGKILL before (UPDATE, MICROBATCH) is computed if told to, and prints the sha256 of all that training changes.
"""

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep.events import Evaluate, Save, UpdateEvent
from evenstep.optim.schedules import Linear
from evenstep.options import Compile
from rows.killed import Classify, Points, digest

UPDATES = 14


class Block(nn.Module):
    """What is compiled by itself where the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(nn.functional.gelu(self.norm(self.inner(x))))


class Killed(Classify):
    """Kills the process before a micro-batch is computed: within a graph nobody hears of it."""

    def __init__(self, update: int, microbatch: int) -> None:
        super().__init__()
        self._at, self._update, self._seen = (update, microbatch), 0, 0

    def before_update(self, event: UpdateEvent) -> None:
        self._update, self._seen = event.update, 0

    def transform(self, batch: Any) -> Any:
        if (self._update, self._seen) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self._seen += 1
        return batch


def main(folder: str, compile: Compile, precision: str, kill_at: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
    trainer = evenstep.Trainer(
        model=model,
        task=Killed(*kill_at),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        precision=precision,
        data=evenstep.MapData(Points(), global_batch_size=18, micro_batch_size=9),
        updates=UPDATES,
        seed=3,
        device="cpu",
        lr_schedule=Linear(warmup_updates=8),
        train=evenstep.Training(
            clip_norm=1.0, ema=evenstep.Ema(decay=0.9, decay_warmup=False), compile=compile, check_loss=False
        ),
        evaluations={"valid": evenstep.MapData(Points(), global_batch_size=30, shuffle=False)},
        hooks=[Evaluate(every_updates=3), Save(every_updates=4)],
        folder=folder,
        log=evenstep.Logging(writers=()),
    )
    trainer.resume("auto")
    trainer.train()
    state = trainer.state_dict()
    parts = [state[part] for part in ("model", "ema", "precision", "progress", "storage")]
    print(digest([*parts, state["optimizer"]["state"]]))


if __name__ == "__main__":
    place = (int(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 4 else (-1, -1)
    main(sys.argv[1], "model" if sys.argv[2] == "model" else "update", sys.argv[3], place)
