"""Evaluations of a run: tried before training, broken off by urgent stops, refused in hooks."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Evaluation, Hook, MapData, StreamData, Trainer
from evenstep.errors import ArgumentError, LostRankError
from evenstep.events import StopFile, TimeBudget
from evenstep.parallel import Ddp
from kit import Squares, data, history, net, points, saved_updates, stacked, trainer_of
from refused import refused
from threads import ends_of_ranks


class Slow(nn.Linear):
    """Takes a moment for each batch of an evaluation."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            time.sleep(0.02)
        return super().forward(input)


def test_faults_of_evaluation_data_are_found_before_the_first_update() -> None:
    trainer = trainer_of(evaluations=MapData([(torch.zeros(4), torch.zeros(1))] * 4, global_batch_size=2))
    with pytest.raises(RuntimeError):
        trainer.train()
    assert trainer.progress.update == 0


def test_the_trial_of_an_evaluation_leaves_no_metrics_and_no_events() -> None:
    heard: list[int] = []

    class Listen(Hook):
        def after_evaluate(self, event: Any) -> None:
            heard.append(event.update)

    trainer = trainer_of(None, Listen(), evaluations=data(8), evaluation=Evaluation(every_updates=3))
    trainer.train()
    assert heard == [record.update for record in trainer.storage.history("valid/loss")] == [3, 6]


def test_any_data_can_be_evaluated_by_the_current_parameters() -> None:
    trainer, some = trainer_of(net(), evaluations=data(8)), data(5)
    before = trainer.evaluate(some)
    trainer.train()
    x, y = stacked(points(5))
    with torch.no_grad():
        wanted = float(((trainer.model(x).squeeze(-1) - y) ** 2).mean())
    assert trainer.evaluate(some) == {"loss": pytest.approx(wanted)} != before
    assert "data/loss" not in trainer.storage.names()
    with refused(ArgumentError, "data"):
        trainer.evaluate("test")


@pytest.mark.parametrize("does", ["evaluate", "save"])
def test_a_hook_that_evaluates_or_saves_by_itself_is_refused(does: str, tmp_path: Path) -> None:
    class Hasty(Hook):
        def after_update(self, event: Any) -> None:
            getattr(self.trainer, does)()

    trainer = trainer_of(None, Hasty(), folder=tmp_path, evaluations=data(8))
    with pytest.raises(ArgumentError, match=f"request_{does}"):
        trainer.train()


class InEvaluation(Hook):
    """Acts once, when the evaluation after update 2 begins."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.left = [act]

    def before_evaluate(self, event: Any) -> None:
        if event.update == 2 and self.left:
            self.left.pop()()


def urgent(kind: str, folder: Path) -> list[Hook]:
    if kind == "time":
        return [TimeBudget(max_minutes=1 / 60)]
    if kind == "file":
        return [StopFile(), InEvaluation((folder / "stop").touch)]
    return [InEvaluation(lambda: os.kill(os.getpid(), signal.SIGTERM))]


@pytest.mark.parametrize(("kind", "updates"), [("signal", 4), ("signal", 2), ("time", 2), ("file", 4)])
def test_an_urgent_stop_breaks_off_an_evaluation_which_a_resumed_run_makes(
    kind: str, updates: int, tmp_path: Path
) -> None:
    """Between updates, or at the end of the run."""
    some, folder = points(320, dtype=torch.float32), tmp_path / "run"

    def run(hooks: list[Hook]) -> Trainer:
        valid = MapData(some, global_batch_size=1, shuffle=False)
        each = Evaluation(every_updates=2)
        more = {"evaluations": valid, "evaluation": each, "folder": folder, "updates": updates}
        trainer = trainer_of(Slow(3, 1), *hooks, **more)
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
    del some[1:]
    again = run([])
    assert again.progress.update == 2
    again.train()
    assert len(history(again, "valid/loss")) == updates // 2


class Stuck:
    """A stream that waits for a sample that does not come."""

    def __iter__(self) -> Iterator[Any]:
        yield from points(8)
        time.sleep(30)
        yield from points(8)


def test_a_signal_breaks_off_waiting_for_data(tmp_path: Path) -> None:
    trainer = trainer_of(data=StreamData(Stuck(), global_batch_size=4), folder=tmp_path)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    with pytest.raises(SystemExit):
        trainer.train()
    assert time.monotonic() - began < 5 and saved_updates(tmp_path) == [trainer.progress.update] == [1]


@pytest.mark.parametrize("does", ["evaluate", "predict"])
def test_the_others_learn_at_once_why_one_rank_can_not_go_on(does: str) -> None:
    def act(group: Any) -> None:
        class Fails(Squares):
            def loss(self, output: Any, batch: Any) -> Tensor:
                if group.rank == 1 and self.now.is_evaluating:
                    raise KeyError("boom")
                return super().loss(output, batch)

            def predict(self, output: Any, batch: Any) -> Any:
                if group.rank == 1:
                    raise KeyError("boom")
                return output

        trainer = trainer_of(task=Fails(), evaluations=data(8, micro=2), strategy=Ddp(group))
        getattr(trainer, does)(*([data(8, micro=2)] if does == "predict" else []))

    first, second = ends_of_ranks(2, act)
    assert isinstance(second, KeyError) and isinstance(first, LostRankError)
    assert "KeyError" in str(first)
