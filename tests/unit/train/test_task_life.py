"""What a task is told, in which order, and what it is asked: under one name each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Engine, Hook, Loss, MapData, Mixture, Task, Trainer, Training

MOMENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))


class Squares(Task):
    """Writes down what it is told and asked, in order."""

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

    def loss(self, output: Any, batch: Any) -> Loss:
        self.told.append("loss")
        return Loss(((output - batch[1]) ** 2).sum())


def _tells(moment: str) -> Callable[[Squares, Any], None]:
    def method(self: Squares, event: Any) -> None:
        self.told.append(moment)

    return method


class Told(Squares):
    """Is told all that there is."""


for moment in MOMENTS:
    setattr(Told, moment, _tells(moment))


def points(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double())
        for _ in range(count)
    ]


def line() -> nn.Module:
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.1)
    return model


def data(size: int = 4, micro: int = 2, **more: Any) -> MapData:
    return MapData(points(), global_batch_size=size, micro_batch_size=micro, shuffle=False, **more)


def trainer_of(task: Any, model: nn.Module | None = None, **more: Any) -> Trainer:
    model = model or line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more.setdefault("data", data())
    more.setdefault("updates", 1)
    train = more.pop("train", Training(check_loss=False))
    return Trainer(model=model, task=task, optimizer=optimizer, device="cpu", train=train, **more)


ONE = ["before_microbatch", "transform", "before_forward", "inputs", "postprocess", "after_forward", "loss"]
BACK = ["before_backward", "after_backward", "after_microbatch"]


def test_a_task_is_told_what_hooks_are_told_in_the_order_of_the_page() -> None:
    task = Told()
    trainer_of(task, evaluations={"valid": data(micro=4)}).train()
    passes = [*ONE, *BACK] * 2
    assert task.told == [
        *("before_train", "before_epoch"),
        *("transform", "inputs", "postprocess", "loss"),  # the evaluation is tried
        "before_update",
        *passes,
        *("before_step", "after_step", "after_update", "after_epoch"),
        *("before_evaluate", *ONE, "after_microbatch", "after_evaluate"),
        "after_train",
    ]


def test_a_task_is_called_before_hooks_and_only_for_its_own_micro_batches() -> None:
    order: list[str] = []

    class Say(Hook):
        priority = -1

        def before_epoch(self, event: Any) -> None:
            order.append("hook that is first")

    class Late(Hook):
        def before_epoch(self, event: Any) -> None:
            order.append("hook")

    class Hears(Squares):
        def before_epoch(self, event: Any) -> None:
            order.append(f"task in epoch {event.epoch}")

        def before_microbatch(self, event: Any) -> None:
            self.told.append(event.task)

    tasks = {"a": Hears(), "b": Hears()}
    trainer_of(tasks, data=Mixture({"a": data(), "b": data(size=2)}), hooks=[Late(), Say()]).train()
    assert order == ["hook that is first", "task in epoch 0", "task in epoch 0", "hook"]
    assert "a" in tasks["a"].told and "b" not in tasks["a"].told
    assert "b" in tasks["b"].told and "a" not in tasks["b"].told


def test_an_engine_tells_of_updates_and_evaluations() -> None:
    class Hears(Squares):
        before_update, after_update = _tells("before_update"), _tells("after_update")
        before_evaluate, after_evaluate = _tells("before_evaluate"), _tells("after_evaluate")

    def engine_of(task: Task) -> Engine:
        model = line()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return Engine(model, task, sgd, device="cpu", train=Training(check_loss=False))

    task, batch = Hears(), tuple(torch.stack(part) for part in zip(*points(), strict=True))
    engine = engine_of(task)
    engine.update(batch)
    engine.evaluate(batch)
    asked = ["transform", "inputs", "postprocess", "loss"]
    assert task.told == [
        *("before_update", *asked, "after_update"),
        *("before_evaluate", *asked, "after_evaluate"),
    ]


def test_gradients_of_several_batches_accumulate_and_the_last_one_does_not_win() -> None:
    class Scaled(Task):
        """The gradient of a batch of one sample is its label."""

        def loss(self, output: Any, batch: Any) -> Tensor:
            return (output * batch[1]).sum()

    def gradient_of(*labels: float) -> float:
        model = nn.Linear(1, 1, bias=False).double()
        before = model.weight.item()
        engine = Engine(model, Scaled(), torch.optim.SGD(model.parameters(), lr=1.0), device="cpu")
        ones = torch.ones(1, 1, dtype=torch.float64)
        engine.update(microbatches=((ones, label * ones) for label in labels))
        return before - model.weight.item()

    assert gradient_of(1.0, 10.0, 100.0) == pytest.approx(37.0, rel=1e-12)  # not 100, the last one's
    assert gradient_of(100.0, 1.0, 10.0) == pytest.approx(37.0, rel=1e-12)
    assert gradient_of(5.0) == pytest.approx(5.0, rel=1e-12)  # nothing is left over for the next
