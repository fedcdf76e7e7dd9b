"""Buffers that hooks change between updates, and those that forwards make or resize."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Hook, Logging, MapData, Task, Trainer
from evenstep.errors import CheckpointError
from evenstep.events import UpdateEvent


class Moving(nn.Module):
    """A line whose forwards count in a buffer, beside one that only a hook sets."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.register_buffer("forwards", torch.zeros(1))
        self.register_buffer("chosen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.line(x)


class Square(Task):
    """Squares; update 3 can't be made where that is asked for."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if self._fails and self.now.is_training and self.now.update == 3:
            raise ValueError("no third update")
        return ((output - batch[1]) ** 2).sum()


class Chooses(Hook):
    """Sets a buffer after the second update, and raises then if that is asked for."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == 2:
            self.trainer.model.get_buffer("chosen").fill_(7.0)
            if self._fails:
                raise ValueError("after the second update")


@pytest.mark.parametrize("where", ["in a hook", "in the next update"])
def test_an_error_undoes_what_forwards_did_to_buffers_and_not_what_hooks_did_before_it(where: str) -> None:
    model = Moving()
    pairs = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    trainer = Trainer(
        model=model,
        task=Square(fails=where == "in the next update"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=MapData(pairs, global_batch_size=4, micro_batch_size=2),
        updates=4,
        device="cpu",
        hooks=[Chooses(fails=where == "in a hook")],
        log=Logging(writers=()),
    )
    with pytest.raises(ValueError, match="second update" if where == "in a hook" else "no third update"):
        trainer.train()
    state = trainer.state_dict()["model"]
    assert (state["chosen"].item(), state["forwards"].item(), trainer.progress.update) == (7.0, 4.0, 2)


class Made(nn.Module):
    """A line beside a buffer that its forwards make, resize or replace by another one."""

    def __init__(self, how: str, persistent: bool) -> None:
        super().__init__()
        self.line, self.how, self.persistent = nn.Linear(1, 1), how, persistent
        if how != "made":
            self.register_buffer("table", torch.zeros(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "made":
            self.register_buffer("table", torch.ones(1), persistent=self.persistent)
        elif self.how == "resized":
            self.table.resize_(2).fill_(1.0)
        else:
            self.table = torch.ones(2)
        return self.line(x)


def of_made(how: str, *, persistent: bool, folder: Path | None, updates: int = 2) -> Trainer:
    model = Made(how, persistent)
    return Trainer(
        model=model,
        task=Square(fails=False),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=MapData([(torch.ones(1), torch.ones(1))] * 8, global_batch_size=4, micro_batch_size=2),
        updates=updates,
        device="cpu",
        folder=folder,
        log=Logging(writers=()),
    )


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("how", ["made", "resized", "replaced"])
def test_a_buffer_that_forwards_make_or_resize_is_resumed(tmp_path: Path, how: str, persistent: bool) -> None:
    of_made(how, persistent=persistent, folder=tmp_path / "first").train()
    again = of_made(how, persistent=persistent, folder=tmp_path / "again", updates=3)
    if how == "made" and persistent:  # the new model has no such buffer yet
        with pytest.raises(CheckpointError):
            again.resume(tmp_path / "first")
        return
    again.resume(tmp_path / "first")
    assert again.train().update == 3
