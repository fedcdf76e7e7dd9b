"""A run in one number format: `python formatted.py FOLDER PRECISION PIPELINE [UPDATE MICROBATCH]`.

RANK and WORLD_SIZE are as torchrun sets them; ranks beyond PIPELINE are further replicas, and sums are ordered.
Dropout, unequal numbers of tokens, an average, clipping, tied weights, warm-up, evaluation and saves in between. It
goes on from the newest checkpoint in FOLDER, kills itself with SIGKILL at (UPDATE, MICROBATCH) if told to, and rank 0
prints the sha256 of all that training changes.
"""

import os
import sys
from pathlib import Path

import torch

import evenstep
from evenstep.events import Evaluate, Save
from evenstep.optim.schedules import Constant
from evenstep.parallel import Ddp, Group, Mesh, Processes
from evenstep.pipeline import PipelineModel
from rows.cutting import Words
from rows.killed import KillAt, digest
from rows.ranked import sentences
from rows.staged import chain

UPDATES = 16


def mode(precision: str) -> evenstep.precision.Precision | str:
    """Float8 is emulated, in all linear layers that can compute in it."""
    return evenstep.precision.Float8Mixed(layers="*", emulate=True) if precision == "float8-mixed" else precision


def main(folder: Path, precision: str, pipeline: int, kill_at: tuple[int, int] | None) -> None:
    torch.set_num_threads(1)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    world = Processes(torch.device("cpu"), timeout_s=60) if several else Group()
    mesh = Mesh.of(world, pipeline=pipeline)
    torch.manual_seed(mesh.data.rank)  # replicas begin different; the strategy must make them equal
    model = PipelineModel(chain(tied=True), mesh=mesh, schedule="1f1b" if pipeline > 1 else "sequential")
    trainer = evenstep.Trainer(
        model=model,
        task=Words(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True),
        precision=mode(precision),
        data=evenstep.MapData(sentences(52), global_batch_size=16, micro_batch_size=2),
        updates=UPDATES,
        device="cpu",
        strategy=Ddp(mesh.data),
        lr_schedule=Constant(warmup_updates=5),
        train=evenstep.Training(clip_norm=0.5, ema=evenstep.Ema(decay=0.9, decay_warmup=False)),
        evaluations={"valid": evenstep.MapData(sentences(13), global_batch_size=8, micro_batch_size=2, shuffle=False)},
        hooks=[Evaluate(every_updates=7), Save(every_updates=4), None if kill_at is None else KillAt(*kill_at)],
        folder=folder,
        log=evenstep.Logging(writers=()),
    )
    trainer.resume("auto")
    trainer.train()
    state = trainer.state_dict()
    if world.rank == 0:
        parts = [state[part] for part in ("model", "ema", "precision", "progress")]
        print(digest([*parts, state["optimizer"]["state"]]))
    world.gather(None)
    world.close()


if __name__ == "__main__":
    place = (int(sys.argv[4]), int(sys.argv[5])) if len(sys.argv) > 4 else None
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), place)
