"""Requests are carried out when all ranks have agreed on them, by all of them together."""

import math
from pathlib import Path
from typing import Any

import pytest

from evenstep import Checkpointing, Evaluation, Failures, Hook, MapData, Training
from evenstep.parallel import Ddp
from evenstep.train.progress import Result
from evenstep.train.requests import Requests
from kit import data, history, points, saved_updates, trainer_of


class StopWhileSaving(Hook):
    """Requests a stop on rank 1, after the ranks have agreed on what is to be done at this update."""

    def after_update(self, event: Any) -> None:
        if event.update == 2:
            self.trainer.request_save()

    def after_save(self, event: Any) -> None:
        if self.trainer.rank == 1 and event.update == 2:
            self.trainer.request_stop("enough")


def test_all_ranks_agree_on_the_requests_of_one(on_ranks: Any) -> None:
    def act(group: Any) -> Any:
        requests = Requests()
        if group.rank == 1:
            requests.request_stop("", requeue=True)
            requests.save = True
        return requests.agree(group), requests.save, requests.evaluate

    assert on_ranks(2, act) == [(Result("asked to stop", outcome="stopped", requeue=True), True, False)] * 2


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
