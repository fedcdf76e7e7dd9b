"""Frames between `Trainer.train` and the forward of a model, and public members."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep import MapData, Task, Trainer

MOST = 8
OWN = str(Path(evenstep.__file__).parent)


class Seen(nn.Linear):
    """Notes the frames that called its forward in training."""

    frames: list[str] = []  # noqa: RUF012

    def forward(self, input: Tensor) -> Tensor:
        if self.training and not self.frames:
            frame: Any = sys._getframe()
            while frame is not None:
                if frame.f_code.co_filename.startswith(OWN):
                    self.frames.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_qualname}")
                frame = frame.f_back
        return super().forward(input)


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def test_frames_from_train_to_forward() -> None:
    model = Seen(2, 1)
    data = MapData([(torch.ones(2), torch.ones(1))] * 4, global_batch_size=4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    train = evenstep.Training(check_loss=False)
    Trainer(model=model, task=Squares(), optimizer=sgd, data=data, updates=1, device="cpu", train=train).train()
    assert Seen.frames[-1] == "trainer:Trainer.train"
    assert len(Seen.frames) <= MOST, "\n".join(Seen.frames)


def test_trainer_and_engine_have_few_public_members() -> None:
    model = nn.Linear(2, 1)
    data = MapData([(torch.ones(2), torch.ones(1))] * 4, global_batch_size=4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model=model, task=Squares(), optimizer=sgd, data=data, updates=1, device="cpu")
    for one in (trainer, trainer.engine):
        members = [name for name in dir(one) if not name.startswith("_")]
        assert len(members) <= 20, members
