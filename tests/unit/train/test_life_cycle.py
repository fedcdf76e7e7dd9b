"""What happens to a micro-batch, in order, and who hears of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenstep import Hook, MapData, Mixture, Task, Trainer, Training

TRACE: list[str] = []
EACH = ["transform", "forward begin", "inputs", "postprocess", "forward end", "loss"]


class Told(Task):
    """Writes down what it is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def transform(self, batch: Any) -> Any:
        TRACE.append(f"{self.name} transform")
        return batch * 2

    def inputs(self, batch: Any) -> Any:
        TRACE.append(f"{self.name} inputs")
        return batch

    def postprocess(self, output: Any, batch: Any) -> Any:
        TRACE.append(f"{self.name} postprocess")
        return output / 2

    def loss(self, output: Any, batch: Any) -> Any:
        TRACE.append(f"{self.name} loss")
        if output.sum() > 1e6:
            raise RuntimeError("too much")
        return output.sum()


class Hears(Hook):
    def before_microbatch(self, event: Any) -> None:
        TRACE.append(f"{event.task} microbatch begin {event.microbatch} {float(event.batch.sum())}")

    def after_microbatch(self, event: Any) -> None:
        TRACE.append(f"{event.task} microbatch end {'' if event.loss is None else float(event.loss)}".strip())

    def before_forward(self, event: Any) -> None:
        TRACE.append(f"{event.task} forward begin")

    def after_forward(self, event: Any) -> None:
        TRACE.append(f"{event.task} forward end")

    def before_backward(self, event: Any) -> None:
        TRACE.append(f"{event.task} backward begin")

    def after_backward(self, event: Any) -> None:
        TRACE.append(f"{event.task} backward end")

    def before_step(self, event: Any) -> None:
        TRACE.append("step begin")

    def after_step(self, event: Any) -> None:
        TRACE.append("step end")


def trainer_of(values: dict[str, float], **more: Any) -> Trainer:
    TRACE.clear()
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    sets = {name: [torch.tensor([value])] for name, value in values.items()}
    data = Mixture({name: MapData(one, global_batch_size=1) for name, one in sets.items()})
    more.setdefault("hooks", [Hears()])
    return Trainer(
        model=model,
        task={name: Told(name) for name in values},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=data,
        updates=1,
        device="cpu",
        **more,
    )


def test_the_life_of_an_update_in_order() -> None:
    trainer_of({"a": 1.0, "b": 3.0}).train()
    expected: list[str] = []
    for number, (name, value) in enumerate((("a", 1.0), ("b", 3.0))):
        steps = [f"microbatch begin {number} {value}", *EACH, "backward begin", "backward end"]
        expected += [f"{name} {step}" for step in [*steps, f"microbatch end {value}"]]
    assert [*expected, "step begin", "step end"] == TRACE


def test_begin_and_end_are_paired_when_a_task_raises() -> None:
    with pytest.raises(RuntimeError, match="too much"):
        trainer_of({"a": 1.0, "b": 1e9}).train()
    for what in ("microbatch", "forward", "backward", "step"):
        assert sum(f"{what} begin" in line for line in TRACE) == sum(f"{what} end" in line for line in TRACE)
    assert TRACE[-1] == "b microbatch end"


class Pictures(Task):
    """Notes in which order the model gets its images."""

    def __init__(self) -> None:
        self.orders: list[bool] = []

    def transform(self, batch: Any) -> Any:
        return [batch[0].flip(-1).contiguous(), batch[1]]

    def inputs(self, batch: Any) -> Any:
        self.orders.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return batch[0]

    def loss(self, output: Any, batch: Any) -> Any:
        return (output.mean((1, 2, 3)) - batch[1]).square().sum()


def test_channels_last_comes_after_transforms_and_survives_saving_and_resuming(tmp_path: Path) -> None:
    data = [(torch.randn(3, 4, 4), torch.tensor(1.0)) for _ in range(8)]
    for updates in (2, 4):
        model, task = nn.Conv2d(3, 4, 3), Pictures()
        trainer = Trainer(
            model=model,
            task=task,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            data=MapData(data, global_batch_size=4),
            updates=updates,
            device="cpu",
            train=Training(channels_last=True),
            folder=tmp_path,
        )
        trainer.resume()
        trainer.train()
        assert len(task.orders) >= 2 and all(task.orders)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
