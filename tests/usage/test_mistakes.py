"""Usual mistakes of who writes hooks, tasks and scripts: each is answered by a sentence that says what to do."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Hook, Logging, MapData, Task, Trainer
from evenstep.errors import ArgumentError
from evenstep.parallel import Group


class Square(Task):
    def loss(self, output: Any, batch: Any) -> Any:
        return ((output.squeeze(-1) - batch[1]) ** 2).sum()


def points() -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((4,), n / 8), torch.tensor(n % 3 / 2)) for n in range(16)]


def trainer(model: nn.Module | None = None, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1) if model is None else model
    arguments: dict[str, Any] = {
        "model": model,
        "task": Square(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "data": MapData(points(), global_batch_size=8, micro_batch_size=4),
        "updates": 3,
        "device": "cpu",
        "log": Logging(writers=()),
    }
    return Trainer(**arguments | more)


def weights_of(one: Trainer) -> list[float]:
    one.train()
    return one.model.weight.flatten().tolist()


def test_training_inside_no_grad_is_training() -> None:
    with torch.no_grad():
        inside = weights_of(trainer())
    assert inside == weights_of(trainer())


def test_training_in_two_threads_at_once_is_refused_as_they_would_share_random_numbers() -> None:
    refused: list[Exception] = []

    def other() -> None:
        try:
            trainer().train()
        except ArgumentError as error:
            refused.append(error)

    class Starts(Hook):
        def before_update(self, event: Any) -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    trainer(hooks=[Starts()], updates=1).train()
    other()
    assert len(refused) == 1 and "another thread of this process trains" in str(refused[0])


def test_ranks_say_the_number_of_the_update_that_a_hook_or_sample_fails_for(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, seen = list[int](), list[tuple[int, int]]()
    monkeypatch.setattr(Group, "at", lambda group, update: noted.append(update))

    class Looks(Hook):
        def before_update(self, event: Any) -> None:
            seen.append((event.update, noted[-1]))

    class Samples(list[tuple[Tensor, Tensor]]):
        def __getitem__(self, number: Any) -> Any:
            seen.append((progress() + 1, noted[-1]))
            return super().__getitem__(number)

    def progress() -> int:
        return one.progress.update

    one = trainer(hooks=[Looks()], data=MapData(Samples(points()), global_batch_size=8))
    one.train()
    assert len(seen) == 3 + 3 * 8 and all(wanted == said for wanted, said in seen)
