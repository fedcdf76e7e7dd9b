"""Parts of a run's state beside its tensors: flags of modules, late buffers, streams, equal replicas."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Hook, MapData, StreamData, Task, Trainer
from evenstep.checkpoint import complete_checkpoints, read_checkpoint
from evenstep.errors import ReplicaError
from evenstep.events import EpochEvent, Save, UpdateEvent
from evenstep.parallel import Ddp, Zero1
from refused import refused


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Net(nn.Module):
    """A frozen body, a buffer that the first forward makes, and one that a hook resizes."""

    seen: Tensor | None
    starts_here = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)
        self.register_buffer("seen", None)
        self.register_buffer("grown", torch.zeros(2))
        self.body.requires_grad_(False)
        self.body.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.full((3,), 2.0 if self.starts_here else 1.0)
        return self.head(self.body(x))


class WakeUp(Hook):
    def after_update(self, event: UpdateEvent) -> None:
        if event.update == 1:
            self.trainer.model.grown.resize_(4).fill_(3.0)

    def before_epoch(self, event: EpochEvent) -> None:
        if event.epoch == 2:
            self.trainer.model.body.requires_grad_(True)
            self.trainer.model.body.train()


def trainer_of(folder: Path | None, updates: int, **more: Any) -> Trainer:
    model = more.pop("model", None) or Net()
    points = [(torch.full((4,), i / 12), torch.tensor([i / 6])) for i in range(12)]
    more.setdefault("data", MapData(points, global_batch_size=4, micro_batch_size=2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model=model, task=Square(), optimizer=sgd, device="cpu", updates=updates, folder=folder, **more)


@pytest.mark.parametrize("stop", [5, 8], ids=["before it wakes", "after it woke"])
def test_a_part_that_a_hook_woke_stays_awake_after_a_resume(tmp_path: Path, stop: int) -> None:
    whole = trainer_of(None, 12, hooks=[WakeUp()])
    whole.train()
    trainer_of(tmp_path, stop, hooks=[WakeUp()]).train()
    model = Net()
    model.starts_here = False
    resumed = trainer_of(tmp_path, 12, hooks=[WakeUp()], model=model)
    resumed.resume()
    resumed.train()
    assert resumed.model.body.training
    found = resumed.state_dict()["model"]
    for name, value in whole.state_dict()["model"].items():
        assert torch.equal(value, found[name]), name


def test_flags_of_a_part_that_is_built_otherwise_are_the_new_runs(tmp_path: Path) -> None:
    trainer_of(tmp_path, 8, hooks=[WakeUp()]).train()
    model = Net()
    model.body.train()
    resumed = trainer_of(tmp_path, 9, model=model)
    resumed.resume(new_settings=True)
    resumed.train()
    assert resumed.model.body.training
    assert read_checkpoint(tmp_path).state["training"] == {}


class Stale:
    """A stream whose `state_dict` is old right after `load_state_dict`, until it gives an item."""

    def __init__(self) -> None:
        self.at = 0
        self.begin = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, 17):
            yield torch.full((4,), self.at / 16), torch.tensor([self.at / 8])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin, self.at = state["at"], 0


def test_a_stream_with_an_old_state_after_loading_loses_no_sample(tmp_path: Path) -> None:
    class Samples(Hook):
        def __init__(self) -> None:
            self.counts: list[int] = []

        def after_update(self, event: UpdateEvent) -> None:
            self.counts.append(event.num_samples)

    def run(updates: int, folder: Path | None, resumes: bool = False) -> tuple[list[int], dict[str, Tensor]]:
        heard = Samples()
        trainer = trainer_of(folder, updates, data=StreamData(Stale(), global_batch_size=8), hooks=[heard])
        if resumes:
            trainer.resume()
            trainer.save()
        trainer.train()
        return heard.counts, trainer.model.state_dict()

    counts, whole = run(4, None)
    assert counts == [8, 8, 8, 8]
    run(1, tmp_path)
    counts, resumed = run(4, tmp_path, resumes=True)
    assert counts == [8, 8, 8]
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


class Drift(Hook):
    """Changes a parameter on rank 1 after update 4."""

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == 4 and self.trainer.rank == 1:
            with torch.no_grad():
                next(self.trainer.model.head.parameters()).mul_(1.01)


@pytest.mark.parametrize("strategy", [Ddp, Zero1])
def test_no_checkpoint_of_replicas_that_differ_is_published(
    strategy: Any, tmp_path: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    def act(group: Any) -> None:
        trainer = trainer_of(tmp_path, 8, strategy=strategy(group), hooks=[Drift(), Save(every_updates=2)])
        with refused(ReplicaError, "head.weight") as caught:
            trainer.train()
        assert "rank 1" in str(caught.value)

    on_ranks(2, act)
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
