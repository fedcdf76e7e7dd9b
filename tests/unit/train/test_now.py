"""What a task may ask while its methods are called: the update, whether it trains, and the average of the model."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Hook, MapData, Memory, Task, Trainer, Training
from evenstep.errors import TaskError
from evenstep.events import UpdateEvent
from evenstep.parallel import Ddp, Zero1

DECAY = 0.8


class MeanTeacher(Task):
    """The distance to the label, and to what the average gives."""

    uses_average = True

    def loss(self, output: Any, batch: Any) -> Tensor:
        taught = self.now.teacher(self.inputs(batch))
        assert not taught.requires_grad
        return ((output - batch[1]) ** 2).sum() + ((output - taught) ** 2).sum()


class Ignores(MeanTeacher):
    """Asks the average, and makes nothing of it."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.uses_average:
            self.now.teacher(self.inputs(batch))
        return ((output - batch[1]) ** 2).sum()


def points(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double())
        for _ in range(count)
    ]


def network(*more: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(1)  # of its own: ranks that are threads share torch's
    with torch.no_grad():
        for one in model.parameters():
            one.uniform_(-0.5, 0.5, generator=generator)
    return model


def trainer_of(model: nn.Module, task: Task | None = None, **more: Any) -> Trainer:
    more.setdefault("train", Training(ema=Ema(decay=DECAY, decay_warmup=True)))
    more.setdefault("data", MapData(points(), global_batch_size=6, micro_batch_size=4, shuffle=False))
    return Trainer(
        model=model,
        task=task or MeanTeacher(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        updates=more.pop("updates", 6),
        device="cpu",
        **more,
    )


def plain_loop(updates: int = 6) -> list[Tensor]:
    """The same in a few lines of torch, in float64."""
    model, average = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = (torch.stack([point[part] for point in points()]) for part in (0, 1))
    for update in range(1, updates + 1):
        half = slice(0, 6) if update % 2 else slice(6, 12)
        with torch.no_grad():
            taught = average(x[half])
        output = model(x[half])
        optimizer.zero_grad()
        ((((output - y[half]) ** 2).sum() + ((output - taught) ** 2).sum()) / 6).backward()
        optimizer.step()
        decay = min(DECAY, (1 + update) / (10 + update))
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.copy_(decay * old + (1 - decay) * new)
    return [*model.parameters()]


def furthest(model: nn.Module, wanted: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), wanted, strict=True))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 6])
def test_a_mean_teacher_trains_as_a_plain_loop_does_at_every_cut(micro_batch_size: int) -> None:
    model = network()
    data = MapData(points(), global_batch_size=6, micro_batch_size=micro_batch_size, shuffle=False)
    trainer_of(model, data=data).train()
    assert furthest(model, plain_loop()) < 1e-12


@pytest.mark.parametrize("strategy", [Ddp, lambda group: Zero1(group)], ids=["ordered", "zero1"])
def test_two_ranks_have_the_bits_of_one(strategy: Any, on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> list[Tensor]:
        model = network()
        data = MapData(points(), global_batch_size=6, micro_batch_size=1, shuffle=False)
        trainer_of(model, data=data, strategy=strategy(group)).train()
        return [one.detach().clone() for one in model.parameters()]

    alone = network()
    data = MapData(points(), global_batch_size=6, micro_batch_size=1, shuffle=False)
    trainer_of(alone, data=data, strategy=Ddp()).train()
    for found in on_ranks(2, act):
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), found, strict=True))


def test_the_teacher_leaves_no_trace_where_nothing_is_made_of_it() -> None:
    class Without(Ignores):
        uses_average = False

    def more() -> tuple[nn.Module, ...]:
        return nn.BatchNorm1d(4), nn.Dropout(0.5)

    asking, without = network(*more()), network(*more())
    for model, task in ((asking, Ignores()), (without, Without())):
        train = Training(ema=Ema(decay=DECAY), memory=Memory(checkpoint="*"))
        trainer_of(model, task, train=train).train()
    other = without.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in asking.state_dict().items())
    assert asking.training


def test_a_run_with_a_teacher_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    class StopAt(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.update == 3:
                self.trainer.request_stop("three")

    straight, stopped, again = network(), network(), network()
    trainer_of(straight).train()
    trainer_of(stopped, folder=tmp_path, hooks=[StopAt()]).train()
    trainer = trainer_of(again, folder=tmp_path)
    trainer.resume()
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), again.parameters(), strict=True))


def test_a_task_knows_the_update_and_whether_it_trains() -> None:
    seen: list[tuple[int, bool]] = []

    class Told(Task):
        def loss(self, output: Any, batch: Any) -> Tensor:
            seen.append((self.now.update, self.now.is_training))
            return ((output - batch[1]) ** 2).sum()

    valid = MapData(points(2), global_batch_size=2, shuffle=False)
    trainer = trainer_of(network(), Told(), train=Training(check_loss=False), updates=3, evaluations={"valid": valid})
    trainer.train()
    assert [one for one in seen if one[1]] == [(1, True)] * 2 + [(2, True)] * 2 + [(3, True)] * 2
    assert (seen[0], seen[-1]) == ((0, False), (3, False))


def test_now_is_nobodys_before_a_trainer_after_it_and_in_a_copy() -> None:
    task = Ignores()
    with pytest.raises(TaskError):
        _ = task.now.update
    trainer = trainer_of(network(), task)
    assert task.now.update == 1
    for other in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        with pytest.raises(TaskError):
            _ = other.now.update
    gone = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert gone() is None
    with pytest.raises(TaskError):
        _ = task.now.is_training
