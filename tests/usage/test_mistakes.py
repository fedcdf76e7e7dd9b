"""Usual mistakes of who writes hooks, tasks and scripts: each is answered by a sentence that says what to do."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Hook, Logging, MapData, Task, Trainer
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


def test_training_inside_inference_mode_is_refused() -> None:
    one = trainer()
    with torch.inference_mode(), pytest.raises(ArgumentError):
        one.train()
    one.train()
    model = nn.Linear(4, 1)
    engine = Engine(model=model, task=Square(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    batch = torch.ones(2, 4), torch.ones(2)
    with torch.inference_mode(), pytest.raises(ArgumentError):
        engine.update(batch)
    engine.update(batch)


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


def test_training_and_evaluating_inside_the_callers_autocast_are_refused_with_the_precision_that_is_meant() -> None:
    one = trainer()
    for method in (one.train, lambda: one.predict(MapData([torch.ones(4)], global_batch_size=1))):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError):
            method()
    one.train()
    model = nn.Linear(4, 1)
    batch = torch.ones(2, 4), torch.ones(2)
    for precision in (None, "bf16-mixed"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model=model, task=Square(), optimizer=optimizer, precision=precision, device="cpu")
        for method in (engine.update, engine.evaluate):
            refused = nullcontext() if precision else pytest.raises(ArgumentError, match="was called inside")
            with torch.autocast("cpu", torch.bfloat16), refused:
                method(batch)
            method(batch)


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
