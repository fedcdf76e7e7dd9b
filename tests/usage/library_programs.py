"""Scripts that are launched on several ranks by the tests of the library."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from launched import digest
from torch import nn

from evenstep import Hook, Logging, MapData, Task, Trainer

PAIRS = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]


class Line(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return ((output - batch[1]) ** 2).sum()


class Interrupt(Hook):
    """Ctrl-C on rank 1 alone."""

    def before_update(self, event: Any) -> None:
        if event.update == 2 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGINT)


def trainer_of(**more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    return Trainer(
        model=model,
        task=Line(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=MapData(PAIRS, global_batch_size=4, micro_batch_size=2),
        updates=4,
        device="cpu",
        **more,
    )


def trained_by_name(name: str) -> list[str]:
    """The parameters after two trainers of one script, one after the other."""
    digests: list[str] = []
    for _ in range(2):
        trainer = trainer_of(strategy=name)
        trainer.train()
        digests.append(digest({key: value.float().round(decimals=4) for key, value in whole(trainer).items()}))
    return digests


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.state_dict()["model"]


def interrupted(folder: str) -> tuple[str, int, list[str]]:
    """What a rank raises, where it stands, and which checkpoints there are."""
    trainer = trainer_of(strategy="ddp", folder=folder, hooks=Interrupt(), log=Logging(writers=()))
    try:
        trainer.train()
        said = "went on"
    except KeyboardInterrupt as error:
        said = str(error)
    return said, trainer.progress.update, sorted(path.name for path in Path(folder, "checkpoints").iterdir())
