"""Frames between `Trainer.train` and the forward of a model, and public members."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import evenstep
from evenstep import Training
from kit import engine_of, trainer_of

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


def test_frames_from_train_to_forward() -> None:
    trainer_of(Seen(3, 1), updates=1, train=Training(check_loss=False)).train()
    assert Seen.frames[-1] == "trainer:Trainer.train"
    assert len(Seen.frames) <= MOST, "\n".join(Seen.frames)


@pytest.mark.parametrize("make", [trainer_of, engine_of])
def test_trainer_and_engine_have_few_public_members(make: Any) -> None:
    members = [name for name in dir(make()) if not name.startswith("_")]
    assert len(members) <= 20, members
