"""Calls of a task and of hooks, in order, for an update and its micro-batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Ema, Hook, MapData, Memory, Mixture, Trainer, Training
from evenstep.errors import TaskError
from kit import Squares, data, engine_of, flat, line, net, noisy, points, stacked, trainer_of
from kit import trainer_of as trainer_of_kit
from same import assert_same

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


ONE = ["before_microbatch", "transform", "before_forward", "inputs", "after_forward", "loss"]
BACK = ["before_backward", "after_backward", "after_microbatch"]


def test_a_task_is_told_of_all_moments_in_the_order_of_the_page() -> None:
    task = Told()
    of(task, evaluations={"valid": small(micro=4)}).train()
    assert task.told == [
        *("before_train", "before_epoch"),
        *("transform", "inputs", "loss"),  # the evaluation is tried
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
    asked = ["transform", "inputs", "loss"]
    assert task.told == ["before_update", *asked, "after_update", "before_evaluate", *asked, "after_evaluate"]


DECAY = 0.8


class MeanTeacher(Squares):
    """The distance to the label, and to the output of the average."""

    uses_average = True

    def loss(self, output: Any, batch: Any) -> Tensor:
        taught = self.now.teacher(self.inputs(batch))
        assert not taught.requires_grad
        return super().loss(output, batch) + ((output - taught) ** 2).sum()


class Ignores(MeanTeacher):
    """Asks the average, and makes nothing of it."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        if self.uses_average:
            self.now.teacher(self.inputs(batch))
        return Squares.loss(self, output, batch)


def teaching(model: nn.Module | None = None, *hooks: Any, micro: int = 4, **more: Any) -> Trainer:
    given: dict[str, Any] = {
        "task": MeanTeacher(),
        "train": Training(ema=Ema(decay=DECAY, decay_warmup=True)),
        "data": data(12, size=6, micro=micro, shuffle=False),
    }
    return trainer_of_kit(model or net(), *hooks, **given | more)


def plain_loop() -> Tensor:
    """The same in a few lines of torch."""
    model, average = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for update in range(1, 7):
        x, y = stacked(points(12)[:6] if update % 2 else points(12)[6:])
        output = model(x)
        optimizer.zero_grad()
        losses = ((output.squeeze(-1) - y) ** 2).sum() + ((output - average(x).detach()) ** 2).sum()
        (losses / 6).backward()
        optimizer.step()
        decay = min(DECAY, (1 + update) / (10 + update))
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.copy_(decay * old + (1 - decay) * new)
    return flat(model)


@pytest.mark.parametrize("micro", [1, 4, 6])
def test_a_mean_teacher_trains_as_a_plain_loop_does_at_every_cut(micro: int) -> None:
    trainer = teaching(micro=micro)
    trainer.train()
    torch.testing.assert_close(flat(trainer.model), plain_loop(), rtol=0, atol=1e-12)


def test_the_teacher_leaves_no_trace_where_nothing_is_made_of_it() -> None:
    class Without(Ignores):
        uses_average = False

    asking, without = noisy(), noisy()
    for model, task in ((asking, Ignores()), (without, Without())):
        teaching(model, task=task, train=Training(ema=Ema(decay=DECAY), memory=Memory(checkpoint="*"))).train()
    assert_same(asking.state_dict(), without.state_dict())
    assert asking.training


def test_a_task_knows_the_update_and_whether_it_trains() -> None:
    seen: list[tuple[int, bool]] = []

    class Told(Squares):
        def loss(self, output: Any, batch: Any) -> Tensor:
            seen.append((self.now.update, self.now.is_training))
            return super().loss(output, batch)

    with pytest.raises(TaskError):
        _ = Told().now.update  # which no trainer has
    valid = {"valid": data(2, size=2, micro=2, shuffle=False)}
    teaching(task=Told(), train=Training(check_loss=False), updates=3, evaluations=valid).train()
    assert [update for update, trains in seen if trains] == [1, 1, 2, 2, 3, 3]
    assert (seen[0], seen[-1]) == ((0, False), (3, False))
