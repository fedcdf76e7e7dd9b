"""What a hook puts belongs to an update: it is there once, however often that one was tried and however it was cut."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Failures, Hook, MapData, Task, Trainer
from evenstep.events import MicrobatchEvent, StepEvent, UpdateEvent
from evenstep.parallel import Ddp, Group
from evenstep.precision import Fp16Mixed
from evenstep.train import Retry, Skip

UPDATES = 6


class Square(Task):
    """Squares; at some batches there is no memory for more than one sample, or something is not a number, once."""

    def __init__(self, *, no_memory: bool = False, bad: int = -1, bad_tries: int = 0) -> None:
        self.no_memory, self.bad, self.bad_tries = no_memory, bad, bad_tries

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        total = ((output.float().squeeze(-1) - batch[1]) ** 2).sum()
        if self.no_memory and len(output) > 1:
            raise torch.OutOfMemoryError("no memory for this")
        if self.bad_tries and self.bad in batch[2].tolist():
            self.bad_tries -= 1
            return total * float("nan")
        return total


class Puts(Hook):
    """Puts a value wherever a hook may, and keeps how often it was called."""

    def __init__(self, rank: int = 0) -> None:
        self.calls: list[str] = []
        self.rank = rank

    def _put(self, name: str, update: int) -> None:
        self.calls.append(name)
        self.trainer.storage.put(f"mine/{name}", 1.0 + self.rank, 2, update=update)

    def before_update(self, event: UpdateEvent) -> None:
        self._put("before_update", event.update)

    def before_microbatch(self, event: MicrobatchEvent) -> None:
        self._put("before_microbatch", event.update)

    def before_step(self, event: StepEvent) -> None:
        self._put("before_step", event.update)

    def after_update(self, event: UpdateEvent) -> None:
        self._put("after_update", event.update)


def trainer_of(task: Task, hook: Hook, *, micro_batch_size: int = 2, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    samples = [(torch.randn(3), torch.randn(()), index) for index in range(4 * UPDATES)]
    return Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data=MapData(samples, global_batch_size=4, micro_batch_size=micro_batch_size, shuffle=False),
        device="cpu",
        hooks=[hook],
        **({} if "epochs" in more else {"updates": UPDATES}),
        **more,
    )


def put(trainer: Trainer, name: str) -> dict[int, float]:
    """The weights of what was put, by update."""
    return {record.update: record.weight for record in trainer.storage.history(f"mine/{name}")}


TRIED: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "at once": lambda: ({}, {}),
    "no memory": lambda: ({"no_memory": True}, {}),
    "overflow": lambda: ({}, {"precision": Fp16Mixed(initial=2.0**40)}),
    "not finite, taken again": lambda: (
        {"bad": 9, "bad_tries": 1},
        {"failures": Failures(non_finite=Retry(limit=3))},
    ),
    "not finite, left out": lambda: (
        {"bad": 9, "bad_tries": 9},
        {"failures": Failures(non_finite=Skip()), "epochs": 1},
    ),
}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
@pytest.mark.parametrize("tried", TRIED)
def test_a_value_of_each_update_is_there_once(tried: str, micro_batch_size: int) -> None:
    of_task, more = TRIED[tried]()
    hook = Puts()
    trainer = trainer_of(Square(**of_task), hook, micro_batch_size=micro_batch_size, **more)
    trainer.train()
    count = trainer.progress.update
    assert put(trainer, "before_update") == dict.fromkeys(range(1, count + 1), 2.0)
    assert put(trainer, "before_step") == dict.fromkeys(range(1, count + 1), 2.0)
    assert put(trainer, "after_update") == dict.fromkeys(range(1, count + 1), 2.0)
    of_parts = 2.0 * (4 if tried == "no memory" else -(-4 // micro_batch_size))  # each piece is told of
    assert put(trainer, "before_microbatch") == dict.fromkeys(range(1, count + 1), of_parts)
    if tried == "at once":
        assert hook.calls.count("before_update") == UPDATES
    elif tried not in ("no memory",):
        assert hook.calls.count("before_update") > count, "nothing was tried again"


@pytest.mark.parametrize("kind", [Ddp, partial(Ddp, reduction="fast")])
def test_ranks_put_theirs_once_where_one_of_them_overflows(kind: Any, on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Group) -> tuple[dict[int, float], float]:
        task = Square(bad=3, bad_tries=1) if group.rank == 1 else Square()
        failures = Failures(non_finite=Retry(limit=3))
        trainer = trainer_of(task, Puts(group.rank), micro_batch_size=1, strategy=kind(group), failures=failures)
        trainer.train()
        latest = trainer.storage.latest("mine/before_update")
        assert latest is not None
        return put(trainer, "before_update"), latest.value

    for weights, value in on_ranks(2, act):
        assert weights == dict.fromkeys(range(1, UPDATES + 1), 4.0)
        assert value == (1.0 + 2.0) / 4.0
