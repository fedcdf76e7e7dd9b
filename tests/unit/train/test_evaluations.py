"""Evaluations of a run: tried before training, broken off by urgent stops; and requests that ranks agree on."""

import math
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

from evenstep import Checkpointing, Evaluation, Failures, Hook, MapData, StreamData, Trainer, Training
from evenstep.errors import ArgumentError, LostRankError
from evenstep.events import StopFile, TimeBudget
from evenstep.parallel import Ddp
from evenstep.train.progress import Result
from evenstep.train.requests import Requests
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


class StopWhileSaving(Hook):
    """Requests a stop on rank 1, after the ranks have agreed on what is to be done at this update."""

    def after_update(self, event: Any) -> None:
        if event.update == 2:
            self.trainer.request_save()

    def after_save(self, event: Any) -> None:
        if self.trainer.rank == 1 and event.update == 2:
            self.trainer.request_stop("enough")


def test_a_stop_requested_during_a_save_stops_all_ranks_at_the_same_update(on_ranks: Any, tmp_path: Path) -> None:
    def act(group: Any) -> Any:
        more = {"strategy": Ddp(group), "folder": tmp_path, "checkpoint": Checkpointing(asynchronous=False)}
        result = trainer_of(None, StopWhileSaving(), data=data(8, size=2, micro=1), **more).train()
        return result.update, result.outcome, result.reason

    assert on_ranks(2, act) == [(3, "stopped", "enough")] * 2


def test_requests_at_an_update_that_was_aborted_are_carried_out_only_when_it_is_made(tmp_path: Path) -> None:
    """As far as the host may run ahead of what was committed, evaluations and checkpoints stay at their updates."""

    class Every3(Hook):
        def after_update(self, event: Any) -> None:
            if event.committed and event.update % 3 == 0:
                self.trainer.request_save()

    some = points(16)
    some[5][0].fill_(math.nan)  # in the third global batch
    trainer = trainer_of(
        None,
        Every3(),
        data=MapData(some, global_batch_size=2, shuffle=False),
        updates=7,
        evaluations={"valid": MapData(some[6:10], global_batch_size=4)},
        evaluation=Evaluation(every_updates=3),
        folder=tmp_path,
        train=Training(settle_every_updates=4),
        checkpoint=Checkpointing(keep_last=None),
        failures=Failures(non_finite="skip"),
    )
    trainer.train()
    assert [record.update for record in trainer.storage.history("valid/loss")] == [3, 6, 7]
    assert saved_updates(tmp_path) == [3, 6, 7]


def test_an_evaluation_requested_during_an_evaluation_is_not_repeated_next_update() -> None:
    """Else a run that goes on from a checkpoint of that update, which knows of it, would make one less."""

    class Again(Hook):
        def after_evaluate(self, event: Any) -> None:
            self.trainer.request_evaluate()

    each = Evaluation(every_updates=3)
    trainer = trainer_of(None, Again(), updates=5, evaluations=data(8), evaluation=each)
    trainer.train()
    assert len(history(trainer, "valid/loss")) == 2


@pytest.mark.parametrize("order", [("good enough", "SIGTERM"), ("SIGTERM", "good enough")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_for_good_goes_before_one_that_wants_the_run_again(
    on_ranks: Any, ranks: int, order: tuple[str, str]
) -> None:
    def act(group: Any) -> Any:
        requests = Requests()
        for number, reason in enumerate(order):
            if ranks == 1 or number == group.rank:
                requests.request_stop(reason, requeue=reason == "SIGTERM")
        return requests.agree(group)

    assert on_ranks(ranks, act) == [Result("good enough", outcome="stopped", requeue=False)] * ranks
