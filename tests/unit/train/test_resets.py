"""Parts of a run's state: those that begin anew when it goes on, flags of modules, equal replicas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Hook, MapData, Trainer
from evenstep.errors import CheckpointError, ReplicaError
from evenstep.events import Best, Evaluate, Save
from evenstep.optim.schedules import Linear
from evenstep.parallel import Ddp, Zero1
from kit import Heard, data, filled, flat, net, points, saved_updates, stacked
from kit import trainer_of as trainer_of_kit
from refused import refused
from same import assert_same


class Seen(Heard):
    """The rate of each update, and what was said."""

    def __init__(self, stop_at: int = 0) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.stop_at = stop_at

    def after_update(self, event: Any) -> None:
        self.rates.append(float(self.trainer.optimizer.param_groups[0]["lr"]))
        if event.update == self.stop_at:
            self.trainer.request_stop("stopped")


def trainer_of(folder: Path | None, *hooks: Any, lr: float = 0.1, momentum: float = 0.9, **more: Any) -> Trainer:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    given: dict[str, Any] = {"data": data(16, size=4, micro=1), "updates": 8, "optimizer": sgd}
    return trainer_of_kit(model, *hooks, folder=folder, **given | more)


def valid() -> MapData:
    return data(7, size=16, micro=None, shuffle=False)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run of four updates, with momentum and a best value."""
    trainer_of(tmp_path / "first", Best(), Evaluate(every_updates=2), updates=4, evaluations=valid()).train()
    return tmp_path / "first"


def plain_loop(begin: Tensor, batches: list[Any], momentum: Tensor | None) -> Tensor:
    """SGD with momentum in a few lines, from given parameters and momenta."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.nn.utils.vector_to_parameters(begin, model.parameters())
    if momentum is not None:
        sizes = [one.numel() for one in model.parameters()]
        for one, value in zip(model.parameters(), momentum.split(sizes), strict=True):
            optimizer.state[one]["momentum_buffer"] = value.view_as(one).clone()
    for batch in batches:
        x, y = stacked(batch)
        optimizer.zero_grad()
        ((model(x).squeeze(-1) - y) ** 2).mean().backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("kept", [False, True], ids=["reset", "kept"])
def test_the_optimizer_is_reset_and_the_count_of_updates_stays(kept: bool, tmp_path: Path) -> None:
    in_turn = {"data": data(16, size=4, micro=None, shuffle=False)}
    before = trainer_of(tmp_path / "first", updates=4, **in_turn)
    before.train()
    momenta = [before.optimizer.state[one]["momentum_buffer"].flatten() for one in before.model.parameters()]
    trainer = trainer_of(tmp_path / "second", updates=6, **in_turn)
    trainer.resume(tmp_path / "first", reset=() if kept else "optimizer", new_settings=True)
    assert trainer.progress.update == 4
    trainer.train()
    some = points(16)
    wanted = plain_loop(flat(before.model), [some[:4], some[4:8]], torch.cat(momenta) if kept else None)
    torch.testing.assert_close(flat(trainer.model), wanted, rtol=0, atol=1e-12)


def test_the_schedule_counts_from_there_also_after_a_second_stop(tmp_path: Path) -> None:
    schedule = Linear(warmup_updates=2, end_factor=0.0)
    trainer_of(tmp_path / "first", updates=4, lr_schedule=schedule).train()

    def run(name: str, seen: Seen, *source: Path, **more: Any) -> Trainer:
        trainer = trainer_of(tmp_path / name, seen, updates=10, lr_schedule=schedule)
        trainer.resume(*source, **more)
        trainer.train()
        return trainer

    straight, stopped, again = Seen(), Seen(stop_at=6), Seen()
    whole = run("straight", straight, tmp_path / "first", reset="lr_schedule")
    assert straight.rates == pytest.approx([0.1 * schedule(update, 6) for update in range(1, 7)])
    run("stopped", stopped, tmp_path / "first", reset="lr_schedule")
    resumed = run("stopped", again)
    assert stopped.rates + again.rates == straight.rates
    assert_same(whole.model.state_dict(), resumed.model.state_dict())


def test_the_data_begin_with_their_first_batch_also_other_data(first: Path, tmp_path: Path) -> None:
    other = {"data": data(8, seed=3, size=2, micro=None, shuffle=False)}
    trainer = trainer_of(tmp_path / "second", Seen(stop_at=6), **other)
    with pytest.raises(CheckpointError):
        trainer.resume(first)
    trainer.resume(first, reset=("data", "optimizer"))
    began = flat(trainer.model)
    trainer.train()
    assert (trainer.progress.update, trainer.progress.position.batch) == (6, 2)
    again = trainer_of(tmp_path / "second", **other)
    again.resume()  # which needs no reset
    again.train()
    some = points(8, seed=3)
    wanted = plain_loop(began, [some[:2], some[2:4], some[4:6], some[6:]], None)
    torch.testing.assert_close(flat(again.model), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reset", [False, True])
def test_metrics_and_their_followers_are_reset(first: Path, tmp_path: Path, reset: bool) -> None:
    best = Best()
    trainer = trainer_of(tmp_path / "second", best, Evaluate(every_updates=2), evaluations=valid())
    trainer.resume(first, reset=("metrics",) if reset else ())
    assert (best.best_value is None, trainer.storage.latest("valid/loss") is None) == (reset, reset)


def test_new_options_of_the_optimizer_win_and_are_said_and_no_schedule_undoes_them(first: Path, tmp_path: Path) -> None:
    seen = Seen()
    trainer = trainer_of(tmp_path / "second", seen, lr=0.02, momentum=0.5)
    trainer.resume(first, new_settings=True)
    trainer.train()
    assert seen.rates == [0.02] * 4
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5
    assert all(option in " ".join(one.message for one in seen.incidents) for option in ("`lr`", "`momentum`"))


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


def waking(folder: Path | None, updates: int, *hooks: Hook, **more: Any) -> Trainer:
    given: dict[str, Any] = {"model": Net(), "data": data(12, size=4, micro=2, dtype=torch.float32)} | more
    return trainer_of_kit(given.pop("model"), *hooks, updates=updates, folder=folder, **given)


@pytest.mark.parametrize("stop", [5, 8], ids=["before it wakes", "after it woke"])
def test_a_part_that_a_hook_woke_stays_awake_after_a_resume(tmp_path: Path, stop: int) -> None:
    whole = waking(None, 9, WakeUp())
    whole.train()
    waking(tmp_path, stop, WakeUp()).train()
    model = Net()
    model.starts_here = False
    resumed = waking(tmp_path, 9, WakeUp(), model=model)
    resumed.resume()
    resumed.train()
    assert resumed.model.body.training
    assert_same(whole.state_dict()["model"], resumed.state_dict()["model"])


class Drift(Hook):
    """Changes a parameter on rank 1 after update 4."""

    def after_update(self, event: Any) -> None:
        if event.update == 4 and self.trainer.rank == 1:
            with torch.no_grad():
                self.trainer.model.head.weight.mul_(1.01)


@pytest.mark.parametrize("strategy", [Ddp, Zero1])
def test_no_checkpoint_of_replicas_that_differ_is_published(strategy: Any, tmp_path: Path, on_ranks: Any) -> None:
    def act(group: Any) -> None:
        trainer = waking(tmp_path, 8, Drift(), Save(every_updates=2), strategy=strategy(group))
        with refused(ReplicaError, "head.weight"):
            trainer.train()

    on_ranks(2, act)
    assert saved_updates(tmp_path) == [2]
