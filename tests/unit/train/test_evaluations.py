"""Evaluations of a run: tried before training, broken off by urgent stops, refused in hooks."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Evaluation, Hook, MapData, StreamData, Task, Trainer
from evenstep.errors import ArgumentError
from evenstep.events import StopFile, TimeBudget
from refused import refused

PAIRS = [(torch.full((2,), n / 8), torch.tensor([n / 8])) for n in range(8)]


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output - batch[1]) ** 2).sum()


class Slow(nn.Linear):
    """Takes a moment for each batch of an evaluation."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            time.sleep(0.02)
        return super().forward(input)


def trainer_of(model: nn.Module | None = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or nn.Linear(2, 1)
    return Trainer(
        **{
            "model": model,
            "task": Squares(),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
            "data": MapData(PAIRS, global_batch_size=4),
            "updates": 4,
            "device": "cpu",
            **more,
        }
    )


def test_faults_of_evaluation_data_are_found_before_the_first_update() -> None:
    samples = [(torch.zeros(3), torch.zeros(1))] * 4
    trainer = trainer_of(evaluations=MapData(samples, global_batch_size=2))
    with pytest.raises(RuntimeError):
        trainer.train()
    assert trainer.progress.update == 0


def test_the_trial_of_an_evaluation_leaves_no_metrics_and_no_events() -> None:
    class Heard(Hook):
        updates: list[int] = []  # noqa: RUF012

        def after_evaluate(self, event: Any) -> None:
            self.updates.append(event.update)

    trainer = trainer_of(evaluations=MapData(PAIRS, global_batch_size=2), hooks=[Heard()])
    trainer.train()
    assert Heard.updates == [2, 4]
    assert [one.update for one in trainer.storage.history("valid/loss")] == [2, 4]


def test_any_data_can_be_evaluated_by_the_current_parameters() -> None:
    trainer = trainer_of(evaluations=MapData(PAIRS, global_batch_size=2))
    data = MapData(PAIRS[:5], global_batch_size=2)
    before = trainer.evaluate(data)
    trainer.train()
    x, y = (torch.stack([pair[part] for pair in PAIRS[:5]]) for part in (0, 1))
    with torch.no_grad():
        wanted = float(((trainer.model(x) - y) ** 2).sum() / 5)
    assert trainer.evaluate(data) == {"loss": pytest.approx(wanted)} != before
    assert "data/loss" not in trainer.storage.names()
    with refused(ArgumentError, "data"):
        trainer.evaluate("test")


@pytest.mark.parametrize("does", ["evaluate", "save"])
def test_a_hook_requests_evaluations_and_saves(does: str, tmp_path: Path) -> None:
    class Hasty(Hook):
        def after_update(self, event: Any) -> None:
            getattr(self.trainer, does)()

    trainer = trainer_of(hooks=[Hasty()], folder=tmp_path, evaluations=MapData(PAIRS, global_batch_size=2))
    with pytest.raises(ArgumentError, match=f"request_{does}"):
        trainer.train()


def urgent(kind: str, folder: Path) -> list[Hook]:
    if kind == "time":
        return [TimeBudget(max_minutes=0.5 / 60)]
    if kind == "file":
        folder.mkdir()
        threading.Timer(0.5, (folder / "stop").touch).start()
        return [StopFile()]
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return []


@pytest.mark.parametrize("updates", [4, 2])  # between updates, at the end of the run
@pytest.mark.parametrize("kind", ["signal", "time", "file"])
def test_an_urgent_stop_breaks_off_an_evaluation_which_a_resumed_run_makes(
    kind: str, updates: int, tmp_path: Path
) -> None:
    samples, folder = PAIRS * 40, tmp_path / "run"

    def run(hooks: list[Hook]) -> Trainer:
        data = MapData(samples, global_batch_size=1, shuffle=False)
        each = Evaluation(every_updates=2)
        trainer = trainer_of(Slow(2, 1), evaluations=data, evaluation=each, folder=folder, hooks=hooks, updates=updates)
        trainer.resume()
        return trainer

    trainer, began = run(urgent(kind, folder)), time.monotonic()
    if kind == "signal":
        with pytest.raises(SystemExit) as ended:
            trainer.train()
        assert ended.value.code == 75
    else:
        result = trainer.train()
        assert (result.outcome, result.requeue) == ("stopped", True)
    assert time.monotonic() - began < 3
    assert trainer.progress.update == 2 and trainer.storage.latest("valid/loss") is None
    samples[:] = PAIRS[:1]
    again = run([])
    assert again.progress.update == 2
    again.train()
    assert [one.update for one in again.storage.history("valid/loss")] == [*range(2, updates + 1, 2)]


class Stuck:
    """A stream that waits for a sample that does not come."""

    def __iter__(self) -> Iterator[Any]:
        yield from PAIRS
        time.sleep(30)
        yield from PAIRS


def test_a_signal_breaks_off_waiting_for_data(tmp_path: Path) -> None:
    trainer = trainer_of(data=StreamData(Stuck(), global_batch_size=4), folder=tmp_path)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(SystemExit):
        trainer.train()
    assert time.monotonic() - began < 5 and trainer.progress.update == 1
    assert (tmp_path / "checkpoints" / "step-00000001").is_dir()
