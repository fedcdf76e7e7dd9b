"""What begins afresh when a run goes on from a named checkpoint, and what does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Hook, MapData, Task, Trainer, Training
from evenstep.errors import CheckpointError
from evenstep.events import Best, Evaluate, Incident, UpdateEvent
from evenstep.optim.schedules import Linear
from evenstep.parallel import Ddp, Zero1


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


def points(seed: int = 0, count: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double())
        for _ in range(count)
    ]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()


class Seen(Hook):
    """The rate and the samples of each update, and what was said."""

    def __init__(self, stop_at: int = 0) -> None:
        self.rates: list[float] = []
        self.said: list[str] = []
        self.stop_at = stop_at

    def after_update(self, event: UpdateEvent) -> None:
        self.rates.append(float(self.trainer.optimizer.param_groups[0]["lr"]))
        if event.update == self.stop_at:
            self.trainer.request_stop("stopped")

    def on_incident(self, event: Incident) -> None:
        self.said.append(event.message)


def trainer_of(folder: Path | None, model: nn.Module | None = None, **more: Any) -> Trainer:
    model = model or network()
    if "epochs" not in more:
        more.setdefault("updates", 8)
    more.setdefault("data", MapData(points(), global_batch_size=4))
    more.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return Trainer(model=model, task=Square(), folder=folder, device="cpu", **more)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run of four updates, with momentum and a best value."""
    valid = MapData(points(7), global_batch_size=16, shuffle=False)
    trainer = trainer_of(tmp_path / "first", updates=4, evaluations=valid, hooks=[Best(), Evaluate(every_updates=2)])
    trainer.train()
    return tmp_path / "first"


def weights(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def plain_loop(begin: list[Tensor], batches: list[list[int]], samples: list[Any], momentum: list[Tensor] | None) -> Any:
    """SGD with momentum in a few lines, from given parameters and momenta."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for one, value in zip(model.parameters(), begin, strict=True):
            one.copy_(value)
    if momentum is not None:
        for one, value in zip(model.parameters(), momentum, strict=True):
            optimizer.state[one]["momentum_buffer"] = value.clone()
    for batch in batches:
        x, y = (torch.stack([samples[index][part] for index in batch]) for part in (0, 1))
        optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / len(batch)).backward()
        optimizer.step()
    return weights(model)


IN_TURN = [list(range(begin, begin + 4)) for begin in (0, 4, 8, 12)]


@pytest.mark.parametrize("kept", [False, True], ids=["reset", "kept"])
def test_the_optimizer_is_reset_and_the_count_of_updates_stays(kept: bool, tmp_path: Path) -> None:
    data = lambda: MapData(points(), global_batch_size=4, shuffle=False)  # noqa: E731
    model = network()
    before = trainer_of(tmp_path / "first", model, updates=4, data=data())
    before.train()
    momenta = [before.optimizer.state[one]["momentum_buffer"].clone() for one in model.parameters()]
    began, second = weights(model), network()
    trainer = trainer_of(tmp_path / "second", second, updates=6, data=data())
    trainer.resume(tmp_path / "first", reset=() if kept else "optimizer", new_settings=True)
    assert trainer.progress.update == 4
    trainer.train()
    wanted = plain_loop(began, IN_TURN[:2], points(), momenta if kept else None)
    assert max(float((a - b).abs().max()) for a, b in zip(weights(second), wanted, strict=True)) < 1e-12
    assert trainer.progress.update == 6


def test_the_schedule_counts_from_there_also_after_a_second_stop(tmp_path: Path) -> None:
    first, straight, stopped, again = Seen(), Seen(), Seen(stop_at=6), Seen()
    schedule = Linear(warmup_updates=2, end_factor=0.0)
    trainer_of(tmp_path / "first", updates=4, lr_schedule=schedule, hooks=[first]).train()
    for name, seen in (("straight", straight), ("stopped", stopped)):
        trainer = trainer_of(tmp_path / name, updates=10, lr_schedule=schedule, hooks=[seen])
        trainer.resume(tmp_path / "first", reset="lr_schedule")
        trainer.train()
    assert straight.rates == pytest.approx([0.1 * schedule(update, 6) for update in range(1, 7)])
    trainer = trainer_of(tmp_path / "stopped", updates=10, lr_schedule=schedule, hooks=[again])
    trainer.resume()
    trainer.train()
    assert stopped.rates + again.rates == straight.rates
    assert "`lr_schedule` is reset" in " ".join(straight.said)
    model = [trainer_of(tmp_path / name, updates=10, lr_schedule=schedule) for name in ("straight", "stopped")]
    for one in model:
        one.resume()
    assert all(torch.equal(a, b) for a, b in zip(weights(model[0].model), weights(model[1].model), strict=True))


def test_the_data_begin_with_their_first_batch_also_other_data(first: Path, tmp_path: Path) -> None:
    other = lambda: MapData(points(3, 8), global_batch_size=2, shuffle=False)  # noqa: E731
    trainer = trainer_of(tmp_path / "second", data=other(), updates=8)
    with pytest.raises(CheckpointError):
        trainer.resume(first)
    model = network()
    trainer = trainer_of(tmp_path / "second", model, data=other(), updates=8, hooks=[Seen(stop_at=6)])
    trainer.resume(first, reset=("data", "optimizer"))
    began = weights(model)
    trainer.train()
    assert (trainer.progress.update, trainer.progress.position.batch) == (6, 2)
    again = network()
    trainer = trainer_of(tmp_path / "second", again, data=other(), updates=8)
    trainer.resume()  # which needs no reset
    trainer.train()
    batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
    wanted = plain_loop(began, batches, points(3, 8), None)
    assert max(float((a - b).abs().max()) for a, b in zip(weights(again), wanted, strict=True)) < 1e-12


def test_metrics_and_their_followers_are_reset(first: Path, tmp_path: Path) -> None:
    valid = MapData(points(7), global_batch_size=16, shuffle=False)
    found: dict[bool, tuple[Any, bool]] = {}
    for reset in (False, True):
        best = Best()
        trainer = trainer_of(tmp_path / str(reset), evaluations=valid, hooks=[best, Evaluate(every_updates=2)])
        trainer.resume(first, reset=("metrics",) if reset else ())
        found[reset] = best.best_value, trainer.storage.latest("valid/loss") is None
    assert found[True] == (None, True)
    assert found[False][0] is not None
    assert found[False][1] is False


@pytest.mark.parametrize("strategy", [Ddp, lambda group: Zero1(group)], ids=["ordered", "zero1"])
def test_two_ranks_reset_with_the_bits_of_one(
    strategy: Any, first: Path, tmp_path: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    def act(group: Any) -> list[Tensor]:
        data = MapData(points(3, 8), global_batch_size=4, micro_batch_size=1)
        trainer = trainer_of(None, data=data, strategy=strategy(group), train=Training(ema=Ema(decay=0.5)))
        trainer.resume(first, reset=("optimizer", "data", "metrics"))
        trainer.train()
        return weights(trainer.model)

    data = MapData(points(3, 8), global_batch_size=4, micro_batch_size=1)
    alone = trainer_of(None, data=data, strategy=Ddp(), train=Training(ema=Ema(decay=0.5)))
    alone.resume(first, reset=("optimizer", "data", "metrics"))
    alone.train()
    for found in on_ranks(2, act):
        assert all(torch.equal(a, b) for a, b in zip(weights(alone.model), found, strict=True))


def test_new_options_of_the_optimizer_win_and_are_said_and_no_schedule_undoes_them(first: Path, tmp_path: Path) -> None:
    model, seen = network(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    trainer = trainer_of(tmp_path / "second", model, optimizer=optimizer, hooks=[seen])
    trainer.resume(first, new_settings=True)
    trainer.train()
    assert seen.rates == [0.02] * 4
    assert optimizer.param_groups[0]["momentum"] == 0.5
    said = " ".join(seen.said)
    assert "the optimizer's `lr` was 0.1 and is now 0.02" in said
    assert "the optimizer's `momentum` was 0.9 and is now 0.5" in said
