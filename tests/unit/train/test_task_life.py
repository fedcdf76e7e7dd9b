"""Calls of a task and of hooks, in order, for an update and its micro-batches."""

from typing import Any

import pytest

from evenstep import Hook, MapData, Mixture, Trainer, Training
from kit import Squares, data, engine_of, line, points, stacked, trainer_of

MOMENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))


class Asked(Squares):
    """Writes down what it is asked, in order; hooks write into the same list."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def transform(self, batch: Any) -> Any:
        self.told.append("transform")
        return batch

    def inputs(self, batch: Any) -> Any:
        self.told.append("inputs")
        return batch[0]

    def postprocess(self, output: Any, batch: Any) -> Any:
        self.told.append("postprocess")
        return output

    def loss(self, output: Any, batch: Any) -> Any:
        self.told.append("loss")
        if batch[1].sum() > 1e6:
            raise RuntimeError("too much")
        return super().loss(output, batch)


def tells(moment: str) -> Any:
    def method(self: Asked, event: Any) -> None:
        self.told.append(moment)

    return method


class Told(Asked):
    """Is told all that there is."""


for moment in MOMENTS:
    setattr(Told, moment, tells(moment))


def small(micro: int = 2, size: int = 4) -> MapData:
    return data(4, size=size, micro=micro, shuffle=False)


def of(task: Any, *hooks: Hook, **more: Any) -> Trainer:
    return trainer_of(
        line(), *hooks, task=task, **{"data": small(), "updates": 1, "train": Training(check_loss=False)} | more
    )


ONE = ["before_microbatch", "transform", "before_forward", "inputs", "postprocess", "after_forward", "loss"]
BACK = ["before_backward", "after_backward", "after_microbatch"]


def test_a_task_is_told_of_all_moments_in_the_order_of_the_page() -> None:
    task = Told()
    of(task, evaluations={"valid": small(micro=4)}).train()
    assert task.told == [
        *("before_train", "before_epoch"),
        *("transform", "inputs", "postprocess", "loss"),  # the evaluation is tried
        *("before_update", *[*ONE, *BACK] * 2, "before_step", "after_step", "after_update", "after_epoch"),
        *("before_evaluate", *ONE, "after_microbatch", "after_evaluate"),
        "after_train",
    ]


def test_begin_and_end_are_paired_when_a_task_raises() -> None:
    task, some = Told(), points(4)
    some[3] = (some[3][0], some[3][1] + 1e9)
    with pytest.raises(RuntimeError, match="too much"):
        of(task, data=MapData(some, global_batch_size=4, micro_batch_size=2, shuffle=False)).train()
    for moment in ("microbatch", "forward", "backward", "update", "epoch", "train"):
        assert task.told.count(f"before_{moment}") == task.told.count(f"after_{moment}"), moment


def test_a_task_is_called_before_hooks_and_only_for_its_own_micro_batches() -> None:
    order: list[str] = []

    class First(Hook):
        priority = -1

        def before_epoch(self, event: Any) -> None:
            order.append("hook that is first")

    class Last(Hook):
        def before_epoch(self, event: Any) -> None:
            order.append("hook")

    class Hears(Asked):
        def before_epoch(self, event: Any) -> None:
            order.append(f"task in epoch {event.epoch}")

        def before_microbatch(self, event: Any) -> None:
            self.told.append(event.task)

    tasks = {"a": Hears(), "b": Hears()}
    of(tasks, Last(), First(), data=Mixture({"a": small(), "b": small(size=2)})).train()
    assert order == ["hook that is first", "task in epoch 0", "task in epoch 0", "hook"]
    for mine, other in (("a", "b"), ("b", "a")):
        assert mine in tasks[mine].told and other not in tasks[mine].told


def test_an_engine_tells_of_updates_and_evaluations() -> None:
    class Hears(Asked):
        before_update, after_update = tells("before_update"), tells("after_update")
        before_evaluate, after_evaluate = tells("before_evaluate"), tells("after_evaluate")

    task, batch = Hears(), stacked(points(4))
    engine = engine_of(line(), task, train=Training(check_loss=False))
    engine.update(batch)
    engine.evaluate(batch)
    asked = ["transform", "inputs", "postprocess", "loss"]
    assert task.told == ["before_update", *asked, "after_update", "before_evaluate", *asked, "after_evaluate"]
