"""Parts of a run's state beside its parameters: flags of modules, buffers, streams, equal replicas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Hook, Trainer
from evenstep.checkpoint import read_checkpoint
from evenstep.errors import ReplicaError
from evenstep.events import Save
from evenstep.parallel import Ddp, Zero1
from kit import data, filled, saved_updates
from kit import trainer_of as trainer_of_kit
from refused import refused
from same import assert_same


class Net(nn.Module):
    """A frozen body, a buffer that the first forward makes, and one that a hook resizes."""

    seen: Tensor | None
    starts_here = True

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.head = nn.Linear(3, 1)
        filled(self)
        self.register_buffer("seen", None)
        self.register_buffer("grown", torch.zeros(2))
        self.body.requires_grad_(False)
        self.body.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.full((3,), 2.0 if self.starts_here else 1.0)
        return self.head(self.body(x))


class WakeUp(Hook):
    def after_update(self, event: Any) -> None:
        if event.update == 1:
            self.trainer.model.grown.resize_(4).fill_(3.0)

    def before_epoch(self, event: Any) -> None:
        if event.epoch == 2:
            self.trainer.model.body.requires_grad_(True)
            self.trainer.model.body.train()


def trainer_of(folder: Path | None, updates: int, *hooks: Hook, **more: Any) -> Trainer:
    given: dict[str, Any] = {"model": Net(), "data": data(12, size=4, micro=2, dtype=torch.float32)} | more
    return trainer_of_kit(given.pop("model"), *hooks, updates=updates, folder=folder, **given)


@pytest.mark.parametrize("stop", [5, 8], ids=["before it wakes", "after it woke"])
def test_a_part_that_a_hook_woke_stays_awake_after_a_resume(tmp_path: Path, stop: int) -> None:
    whole = trainer_of(None, 9, WakeUp())
    whole.train()
    trainer_of(tmp_path, stop, WakeUp()).train()
    model = Net()
    model.starts_here = False
    resumed = trainer_of(tmp_path, 9, WakeUp(), model=model)
    resumed.resume()
    resumed.train()
    assert resumed.model.body.training
    assert_same(whole.state_dict()["model"], resumed.state_dict()["model"])


def test_flags_of_a_part_that_is_built_otherwise_are_the_new_runs(tmp_path: Path) -> None:
    trainer_of(tmp_path, 8, WakeUp()).train()
    model = Net()
    model.body.train()
    resumed = trainer_of(tmp_path, 9, model=model)
    resumed.resume(new_settings=True)
    resumed.train()
    assert resumed.model.body.training
    assert read_checkpoint(tmp_path).state["training"] == {}


class Drift(Hook):
    """Changes a parameter on rank 1 after update 4."""

    def after_update(self, event: Any) -> None:
        if event.update == 4 and self.trainer.rank == 1:
            with torch.no_grad():
                self.trainer.model.head.weight.mul_(1.01)


@pytest.mark.parametrize("strategy", [Ddp, Zero1])
def test_no_checkpoint_of_replicas_that_differ_is_published(strategy: Any, tmp_path: Path, on_ranks: Any) -> None:
    def act(group: Any) -> None:
        trainer = trainer_of(tmp_path, 8, Drift(), Save(every_updates=2), strategy=strategy(group))
        with refused(ReplicaError, "head.weight"):
            trainer.train()

    on_ranks(2, act)
    assert saved_updates(tmp_path) == [2]
