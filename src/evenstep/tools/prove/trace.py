"""Records one update of a run, part by part, in the order in which the parts are computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

from torch import Tensor, nn

from evenstep.events import (
    ForwardBegin,
    ForwardEnd,
    Hook,
    MicrobatchBegin,
    MicrobatchEnd,
    StepBegin,
    UpdateBegin,
    UpdateEnd,
)
from evenstep.tools.prove.digest import states_of
from evenstep.tools.prove.runs import gradients_of
from evenstep.tools.prove.subject import Subject
from evenstep.train import Task
from evenstep.train.tasks.task import weight_of

Values = dict[str, Tensor]


@final
@dataclass(slots=True)
class ModuleCall:
    """Tensors in the inputs and the output of one call of a module."""

    given: Values
    gave: Values


@final
@dataclass(slots=True)
class MicrobatchTrace:
    """One micro-batch.

    Args:
        samples: numbers of its samples in the data set; empty where they are unknown.
        calls: by the module's name and the number of its call, innermost modules first.
    """

    task: str
    index: int = 0
    samples: Sequence[int] = ()
    batch: Values = field(default_factory=dict[str, Tensor])
    transformed: Values = field(default_factory=dict[str, Tensor])
    calls: dict[tuple[str, int], ModuleCall] = field(default_factory=dict[tuple[str, int], ModuleCall])
    output: Values = field(default_factory=dict[str, Tensor])
    loss: float | None = None
    weight: float | None = None


@final
@dataclass(slots=True)
class UpdateTrace:
    """One update; parameters and gradients are by name, without those in shards.

    Args:
        gradient: of the mean loss.
        states: digests of the state of the run's objects as it begins, by path.
    """

    microbatches: list[MicrobatchTrace] = field(default_factory=list[MicrobatchTrace])
    begin: Values = field(default_factory=dict[str, Tensor])
    gradient: Values = field(default_factory=dict[str, Tensor])
    end: Values = field(default_factory=dict[str, Tensor])
    states: dict[str, str] = field(default_factory=dict[str, str])


@final
class Tracer(Hook):
    """Records one update of a subject, and stops the run after it."""

    priority = -10

    def __init__(self, subject: Subject, update: int) -> None:
        self._subject = subject
        self._update = update
        self._remove: list[Callable[[], None]] = []  # of forward hooks; not empty while the update is recorded
        self._calls: dict[str, int] = {}
        self.made = UpdateTrace()

    def before_update(self, event: UpdateBegin) -> None:
        if event.update != self._update:
            return
        self.made.begin = _parameters(self._subject.model)
        self.made.states = states_of(_owners(self._subject))
        for name, module in self._subject.model.named_modules():
            self._remove.append(module.register_forward_hook(self._record(name), with_kwargs=True).remove)

    def before_microbatch(self, event: MicrobatchBegin) -> None:
        if self._remove:
            made = MicrobatchTrace(task=event.task, index=event.microbatch, batch=_tensors_in(event.batch))
            task = self._subject.tasks[event.task]
            made.weight = None if task.late_weight else _weight(task, event.batch)
            self.made.microbatches.append(made)
            self._calls = {}

    def before_forward(self, event: ForwardBegin) -> None:
        if self._remove:
            self.made.microbatches[-1].transformed = _tensors_in(event.batch)

    def after_forward(self, event: ForwardEnd) -> None:
        if self._remove:
            self.made.microbatches[-1].output = _tensors_in(event.output)

    def after_microbatch(self, event: MicrobatchEnd) -> None:
        if self._remove:
            self.made.microbatches[-1].loss = None if event.loss is None else float(event.loss)

    def before_step(self, event: StepBegin) -> None:
        if self._remove:
            self.made.gradient = gradients_of(self._subject.model, event.divisor)

    def after_update(self, event: UpdateEnd) -> None:
        if self._remove:
            for remove in self._remove:
                remove()
            self._remove = []
            self.made.end = _parameters(self._subject.model)
            self.trainer.request_stop("traced")

    def _record(self, name: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            number = self._calls[name] = self._calls.get(name, -1) + 1
            if self.made.microbatches:
                call = ModuleCall(_tensors_in([*args, *kwargs.values()]), _tensors_in(output))
                self.made.microbatches[-1].calls.setdefault((name, number), call)

        return record


def _owners(subject: Subject) -> dict[str, object]:
    return {
        "model": subject.model,
        **{f"task {name}".rstrip(): task for name, task in subject.tasks.items()},
        **{f"hook {hook.name}": hook for hook in subject.hooks},
        "optimizer": subject.optimizer,
        "lr_schedule": subject.lr_schedule,
        "data": subject.data,
        **subject.others,
    }


def _parameters(model: nn.Module) -> Values:
    return {name: one.detach().clone() for name, one in model.named_parameters() if not hasattr(one, "to_local")}


def _tensors_in(value: Any) -> Values:
    return {path: one.detach().clone() for path, one in _walk(value, "", 5)}


def _walk(value: Any, path: str, depth: int) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if not depth:
        return []
    if isinstance(value, Mapping) or hasattr(value, "items"):
        parts = [(f"[{key!r}]", one) for key, one in cast("Any", value).items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", one) for index, one in enumerate(cast("list[Any]", value))]
    else:
        parts = [(f".{key}", one) for key, one in vars(value).items()] if hasattr(value, "__dict__") else []
    return [found for name, inner in parts for found in _walk(inner, f"{path}{name}", depth - 1)]


def _weight(task: Task, batch: Any) -> float | None:
    try:
        return weight_of(task, batch, "a micro-batch")
    except Exception:  # noqa: BLE001 - the update asks for the same weight, and raises
        return None
