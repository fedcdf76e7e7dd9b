"""A metric has the value that it had when it was given, and keeps no graph alive."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from evenstep import Hook, Logging, Loss, MapData, Task, Trainer, Training
from evenstep.events import StepEvent, Storage, UpdateEvent
from evenstep.events.metrics.meters import Meters

UPDATES = 3


class Counting(nn.Module):
    """Has a parameter that is trained, and a buffer that each forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layer(x) * self.scale


class Gives(Task):
    """Gives parameters, buffers and tensors with a graph as metrics, weights and counts."""

    derived: Any = {"doubled": lambda metrics: 2 * metrics["samples"]}  # noqa: RUF012

    def __init__(self, model: Counting) -> None:
        self.of = [model]
        self.floats: dict[str, list[float]] = {"scale": [], "seen": [], "doubled": [], "weighted": []}

    def loss(self, output: Tensor, batch: Any) -> Loss:
        model = self.of[0]
        weight = output.sigmoid().sum()
        for name, value in (("scale", model.scale), ("seen", model.seen), ("doubled", 2 * model.seen)):
            self.floats[name].append(float(value.detach()))
        self.floats["weighted"].append(float(1 / weight.detach()))
        metrics = {"scale": (model.scale, 1), "seen": (model.seen, 1), "weighted": (1.0, weight)}
        return Loss((output**2).sum(), metrics=metrics, counts={"samples": model.seen})


class Puts(Hook):
    """Puts a parameter before it changes, and a running sum."""

    def __init__(self) -> None:
        self.sum = torch.zeros(())
        self.floats: dict[str, list[float]] = {"hook/scale": [], "hook/sum": []}

    def before_step(self, event: StepEvent) -> None:
        self._put("hook/scale", self.trainer.model.scale, event.update)

    def after_update(self, event: UpdateEvent) -> None:
        self.sum += 1
        self._put("hook/sum", self.sum, event.update)

    def _put(self, name: str, value: Tensor, update: int) -> None:
        self.floats[name].append(float(value.detach()))
        self.trainer.storage.put(name, value, update=update)


def trainer_of(model: nn.Module, task: Task, *hooks: Hook, updates: int = UPDATES) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, generator=generator),) for _ in range(8 * UPDATES)]
    return Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=MapData(samples, global_batch_size=8),
        updates=updates,
        device="cpu",
        hooks=hooks,
        train=Training(check_loss=False),
        log=Logging(every_updates=1000, writers=()),
    )


def test_tensors_of_tasks_and_hooks_are_recorded_as_they_were_given() -> None:
    torch.manual_seed(0)
    model = Counting()
    task, hook = Gives(model), Puts()
    trainer = trainer_of(model, task, hook)
    trainer.train()
    given = {f"train/{name}": values for name, values in task.floats.items()} | hook.floats
    found = {name: [record.value for record in trainer.storage.history(name)] for name in given}
    assert found == {name: pytest.approx(values, rel=1e-6) for name, values in given.items()}
    assert all(len(set(values)) == UPDATES for values in found.values())


def test_metrics_keep_no_graph_alive() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Held: ...

    class Hold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            ctx.held = Held()
            alive.add(ctx.held)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient

    class Holds(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return Hold.apply(super().forward(x))

    class Count(Hook):
        def after_update(self, event: UpdateEvent) -> None:
            gc.collect()
            assert not alive

    model = Holds()
    trainer_of(model, Gives(model), Count()).train()


def test_states_of_metric_objects_are_copies_of_what_they_saw() -> None:
    storage = Storage(meters=Meters({"all": torchmetrics.CatMetric()}))
    value = torch.zeros((), requires_grad=True)
    buffer = value * 1
    storage.observe("train/", "all", {"value": buffer}, update=1)
    with torch.no_grad():
        buffer += 7
    (kept,) = storage._meters._meters["train/all"].metric.value
    assert kept == 0 and not kept.requires_grad


def test_a_tensor_of_an_accelerator_is_copied_without_being_read() -> None:
    storage = Storage()
    scalar = torch.empty((), device="meta", requires_grad=True)  # reading it raises
    storage.put("loss", scalar, scalar, update=1)
    ((_, _, total, weight),) = storage._pending
    for copy in (total, weight):
        assert isinstance(copy, Tensor) and copy is not scalar and not copy.requires_grad
