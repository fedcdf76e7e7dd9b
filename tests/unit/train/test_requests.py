"""What is requested is done when all ranks have agreed on it, by all of them together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Checkpointing, Evaluation, Failures, Hook, Logging, MapData, Task, Trainer, Training
from evenstep.events import EvaluateEvent, UpdateEvent
from evenstep.parallel import Ddp
from evenstep.train.requests import End, Requests


class Squares(Task):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


class StopWhileSaving(Hook):
    """Requests a stop on one rank, after the ranks have agreed on what is to be done at this update."""

    def __init__(self, rank: int, on: int) -> None:
        self.rank, self.on = rank, on

    def after_update(self, event: Any) -> None:
        if event.update == 2:
            self.trainer.request_save()

    def after_save(self, event: Any) -> None:
        if self.rank == self.on and event.update == 2:
            self.trainer.request_stop("enough")


def test_what_one_rank_requests_all_agree_on(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> Any:
        requests = Requests()
        if group.rank == 1:
            requests.request_stop("", requeue=True)
            requests.save = True
        return requests.agree(group), requests.save, requests.evaluate

    first, second = on_ranks(2, act)
    assert first == second == (End("asked to stop", outcome="stopped", requeue=True), True, False)


def test_a_stop_requested_during_a_save_stops_all_ranks_at_the_same_update(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    points = [(torch.full((2,), float(n)), torch.tensor(float(n % 3))) for n in range(8)]

    def act(group: Any) -> Any:
        model = nn.Linear(2, 1)
        trainer = Trainer(
            model=model,
            task=Squares(),
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            data=MapData(points, global_batch_size=2, micro_batch_size=1),
            updates=20,
            device="cpu",
            strategy=Ddp(group),
            hooks=[StopWhileSaving(group.rank, on=1)],
            folder=tmp_path,
            checkpoint=Checkpointing(asynchronous=False),
        )
        result = trainer.train()
        return result.update, result.outcome, result.reason

    first, second = on_ranks(2, act)
    assert first == second == (3, "stopped", "enough")


def test_what_was_requested_at_an_update_that_was_aborted_is_done_only_when_it_is_made(tmp_path: Path) -> None:
    """As far as the host may run ahead of what was committed, evaluations and checkpoints stay at their updates."""
    points = [(torch.full((2,), float(n)), torch.tensor(float(n % 3))) for n in range(16)]
    points[5][0].fill_(float("nan"))  # in the third global batch

    class Every3(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            if event.committed and event.update % 3 == 0:
                self.trainer.request_save()

    model = nn.Linear(2, 1)
    trainer = Trainer(
        model=model,
        task=Squares(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, fused=True),
        data=MapData(points, global_batch_size=2, shuffle=False),
        updates=7,
        device="cpu",
        evaluations={"valid": MapData(points[6:10], global_batch_size=4)},
        evaluation=Evaluation(every_updates=3),
        hooks=[Every3()],
        folder=tmp_path,
        train=Training(settle_every_updates=4),
        checkpoint=Checkpointing(keep_last=None),
        failures=Failures(non_finite="skip"),
        log=Logging(every_updates=100, writers=()),
    )
    trainer.train()
    assert [record.update for record in trainer.storage.history("valid/loss")] == [3, 6, 7]
    saved = sorted(path.name for path in Path(tmp_path, "checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000006", "step-00000007"]


def test_an_evaluation_requested_during_an_evaluation_is_not_repeated_next_update() -> None:
    """Else a run that goes on from a checkpoint of that update, which knows of it, would make one less."""

    class Again(Hook):
        def after_evaluate(self, event: EvaluateEvent) -> None:
            self.trainer.request_evaluate()

    points, model = [(torch.full((2,), float(n)), torch.tensor(float(n % 3))) for n in range(8)], nn.Linear(2, 1)
    trainer = Trainer(
        model=model,
        task=Squares(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data=MapData(points, global_batch_size=4),
        updates=5,
        device="cpu",
        evaluations=MapData(points, global_batch_size=8),
        evaluation=Evaluation(every_updates=3),
        hooks=[Again()],
    )
    trainer.train()
    assert [record.update for record in trainer.storage.history("valid/loss")] == [3, 5]


@pytest.mark.parametrize("order", [("good enough", "SIGTERM"), ("SIGTERM", "good enough")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_for_good_goes_before_one_that_wants_the_run_again(
    on_ranks: Callable[..., list[Any]], ranks: int, order: tuple[str, str]
) -> None:
    def rank(group: Any) -> Any:
        requests = Requests()
        for number, reason in enumerate(order):
            if ranks == 1 or number == group.rank:
                requests.request_stop(reason, requeue=reason == "SIGTERM")
        return requests.agree(group)

    assert set(on_ranks(ranks, rank)) == {End("good enough", outcome="stopped", requeue=False)}
