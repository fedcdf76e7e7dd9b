"""One rank of a run on several: `python ranked.py FOLDER STRATEGY UPDATES`; RANK and WORLD_SIZE as torchrun sets them.

Dropout, unequal numbers of tokens, shuffling, sixteen micro-batches in eight blocks, a last global batch of four (so
that of eight ranks four have no work), evaluation in between. It goes on from the newest checkpoint in FOLDER. Rank 0
prints the sha256 of what training changes and writes the parameters to FOLDER/parameters.pt.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep.events import Evaluate
from evenstep.optim.schedules import Constant
from evenstep.parallel import Ddp, Fsdp, Group, Processes, Single, Strategy, Zero1
from rows.cutting import IGNORED, LENGTH, WORDS, Words
from rows.killed import digest

STRATEGIES: dict[str, Callable[[Group], Strategy]] = {
    "single": Single,
    "ddp": Ddp,
    "zero1": Zero1,
    "fsdp": Fsdp,
    "hybrid": partial(Fsdp, shard_ranks=2),
    "fast ddp": partial(Ddp, reduction="fast"),
    "fast zero1": partial(Zero1, reduction="fast"),
    "fast fsdp": partial(Fsdp, reduction="fast"),
    "fast hybrid": partial(Fsdp, reduction="fast", shard_ranks=2),
}


def sentences(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        words, targets = (torch.randint(WORDS, (LENGTH,), generator=generator) for _ in range(2))
        targets[int(torch.randint(1, LENGTH + 1, (), generator=generator)) :] = IGNORED
        made.append((words, targets))
    return made


def main(folder: Path, strategy: str, updates: int) -> None:
    torch.set_num_threads(1)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    group = Processes(torch.device("cpu"), timeout_s=60) if several else Group()
    torch.manual_seed(group.rank)  # replicas begin different; the strategy must make them equal
    model: Any = nn.Sequential(
        nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.Dropout(0.2), nn.Tanh(), nn.Linear(48, WORDS)
    )
    trainer = evenstep.Trainer(
        model=model,
        task=Words(),
        # torch's fused kernels round the ends of a tensor differently on the CPU, so shards would differ in bits.
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True),
        data=evenstep.MapData(sentences(52), global_batch_size=16, micro_batch_size=1),
        updates=updates,
        device="cpu",
        strategy=STRATEGIES[strategy](group),
        lr_schedule=Constant(warmup_updates=5),
        train=evenstep.Training(clip_norm=0.5),
        evaluations={"valid": evenstep.MapData(sentences(13), global_batch_size=8, micro_batch_size=2, shuffle=False)},
        hooks=[Evaluate(every_updates=7)],
        folder=folder,
        log=evenstep.Logging(writers=()),
    )
    trainer.resume("auto")
    trainer.train()
    state = trainer.state_dict()
    if group.rank == 0:
        torch.save(state["model"], folder / "parameters.pt")
        print(digest([state["model"], state["optimizer"]["state"], state["progress"]]))
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
