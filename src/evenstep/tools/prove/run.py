"""Makes one run of the user's model and data, computed as a variant says, and keeps its result."""

import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.data.tree import leaves
from evenstep.errors import EvenstepError
from evenstep.events import Hook, MicrobatchEvent, SaveEvent, StepEvent, UpdateEvent
from evenstep.optim.schedules import LrSchedule
from evenstep.tools.prove.laboratory import Laboratory, wide_defaults, widen_data
from evenstep.tools.prove.trace import Parts, Values, digest, distance, states_of
from evenstep.train import Task, Trainer
from evenstep.train.tasks.task import weight_of

Cut = Literal["1", "2", "4", "ragged"]


class RefusedError(EvenstepError):
    """A variant that is refused for this run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compute the run.

    Args:
        cut: micro-batches of a global batch; "ragged" are of different sizes.
        still: replace random numbers by constants, and compute in float32, so that micro-batches can be compared.
        wide: compute in float64 instead.
        pipeline: ranks that share a model in stages.
    """

    cut: Cut = "4"
    still: bool = False
    wide: bool = False
    strategy: str = "single"
    ranks: int = 1
    pipeline: int = 1
    checks_loss: bool = False
    workers: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Objects of a variant before training; the name of a run's only task is ""."""

    model: nn.Module
    tasks: Mapping[str, Task]
    optimizer: Optimizer
    data: Data
    hooks: Sequence[Hook]
    trainer: Callable[[Data, Sequence[Hook], Path | None], Trainer]
    lr_schedule: LrSchedule | None = None

    def widen(self) -> None:
        """Put the model, its data, and the state that its optimizer already has, into float64."""
        self.model.double()
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                    state[name] = value.double()
        widen_data(self.data)

    def owners(self) -> dict[str, object]:
        """Objects whose attributes may hold state, by name."""
        tasks = {f"task {name}".rstrip(): task for name, task in self.tasks.items()}
        hooks = {f"hook {hook.name}": hook for hook in self.hooks}
        others = {"optimizer": self.optimizer, "lr_schedule": self.lr_schedule, "data": self.data}
        return {"model": self.model, **tasks, **hooks, **others}


Open = Callable[[Variant], AbstractContextManager[Subject]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a run.

    Args:
        sha256: of all that training changes.
        moved: distance of the parameters and buffers from their begin.
        first: parameters after the first update.
        gradient: of the first update, by parameter; empty where parameters are sharded or in stages.
        parts: of the last update, and digests of states as it begins, if they were asked for.
    """

    sha256: str = ""
    end: Values
    moved: float = 0.0
    first: Values = field(default_factory=dict[str, Tensor])
    gradient: Values
    parts: Parts = field(default_factory=dict[str, Any])
    states: Mapping[str, str] = field(default_factory=dict[str, str])


@final
class Observer(Hook):
    """Computes updates as the variant says, records the last one part by part, and stops after it.

    The run keeps its whole length, which its LR schedule counts with. In the backward of update `kill_at` it kills the
    process, once a checkpoint is there.
    """

    priority = -1_000_000

    def __init__(
        self,
        subject: Subject,
        variant: Variant,
        *,
        updates: int,
        kill_at: int | None,
        traces: bool,
        began: Callable[[], object],
    ) -> None:
        self._subject = subject
        self._variant = variant
        self._updates = updates
        self._kill_at = kill_at
        self._traces = traces
        self._began = began
        self._saved = False
        self._inside: Laboratory | None = None
        self._remove: list[Callable[[], None]] = []  # of forward hooks; not empty while an update is recorded
        self._microbatch = 0
        self._of_task = ""
        self.first: Values = {}
        self.gradient: Values = {}
        self.parts: Parts = {}
        self.states: Mapping[str, str] = {}

    def before_update(self, event: UpdateEvent) -> None:
        self._began()
        if self._variant.still:
            self._inside = Laboratory(wide=self._variant.wide)
            self._inside.__enter__()
        if self._traces and event.update == self._updates:
            self.parts, self.states = {}, states_of(self._subject.owners())
            self._add("the model before the forward", _named(_parameters(self._subject.model)))
            for name, module in self._subject.model.named_modules():
                self._remove.append(module.register_forward_hook(self._recorder(name), with_kwargs=True).remove)

    def before_microbatch(self, event: MicrobatchEvent) -> None:
        self._microbatch = event.microbatch
        self._of_task = f" of task `{event.task}`" if event.task else ""
        if self._remove:
            self._add("the batch", _tensors_in(event.batch))
            task = self._subject.tasks[event.task]
            if not task.late_weight:
                self._add("the weight", {"": torch.as_tensor(weight_of(task, event.batch, "a micro-batch"))})

    def before_forward(self, event: MicrobatchEvent) -> None:
        if self._remove:
            self._add("`transform`", _tensors_in(event.batch))

    def before_backward(self, event: MicrobatchEvent) -> None:
        if event.update == self._kill_at and self._saved:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_microbatch(self, event: MicrobatchEvent) -> None:
        if self._remove and event.loss is not None:
            self._add("the loss", {"": torch.as_tensor(event.loss).detach().clone()})

    def before_step(self, event: StepEvent) -> None:
        self._microbatch = 0
        self._of_task = ""
        if event.update == 1:
            self.gradient = gradient_of(self._subject.model, event.divisor)
        if self._remove:
            self._add("the gradient of the update", _named(gradient_of(self._subject.model, event.divisor)))

    def after_update(self, event: UpdateEvent) -> None:
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None
        if event.update == 1:
            self.first = _parameters(self._subject.model)
        if self._remove:
            for remove in self._remove:
                remove()
            self._remove = []
            self._add("the step", _named(_parameters(self._subject.model)))
        if self._kill_at is not None and event.update == max(1, self._kill_at - 1):
            self.trainer.request_save()
        if event.update >= self._updates:
            self.trainer.request_stop("enough to compare")

    def after_save(self, event: SaveEvent) -> None:
        self._saved = self._saved or event.path is not None

    def _add(self, part: str, gave: Values, given: Values | None = None) -> None:
        calls = self.parts.setdefault(part + self._of_task, {})
        calls.setdefault(self._microbatch, (given or {}, gave))  # of a module the first call

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            part = f"module `{name}`" if name else "the model"
            self._add(part, _tensors_in(output), _tensors_in([*args, *kwargs.values()]))

        return record


def _parameters(model: nn.Module) -> Values:
    return {name: one.detach().clone() for name, one in model.named_parameters() if not hasattr(one, "to_local")}


def _named(values: Values) -> Values:
    return {f"parameter `{name}`": one for name, one in values.items()}


def _tensors_in(value: Any) -> Values:
    found = [(path, one) for path, one in leaves(value) if isinstance(one, Tensor)]
    return {f"`{path}`" if path else "": one.detach().clone() for path, one in found}


def gradient_of(model: nn.Module, divisor: float | Tensor = 1.0) -> Values:
    """Gradients of parameters that this process holds whole, by name; none where any is in shards."""
    held = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    if any(hasattr(one, "to_local") for one in held.values()):
        return {}
    return {name: one.detach().clone() / divisor for name, one in held.items()}


def run_once(
    open_subject: Open,
    variant: Variant,
    /,
    *,
    updates: int,
    folder: Path | None = None,
    kill_at: int | None = None,
    traces: bool = False,
    began: Callable[[], object] = lambda: None,
) -> Ended:
    """Build a variant and train it until so many updates are done.

    Args:
        folder: where the run saves, and from where it resumes.
        traces: record the parts of the last update.
        began: called as an update begins.
    """
    with open_subject(variant) as subject:
        if variant.wide:
            subject.widen()
        observer = Observer(subject, variant, updates=updates, kill_at=kill_at, traces=traces, began=began)
        trainer = subject.trainer(subject.data, [*subject.hooks, observer], folder)
        with closing(subject.data), wide_defaults(wide=variant.wide):
            begin = _tensors(trainer.state_dict()["model"])
            if folder is not None:
                trainer.resume("auto")
            if trainer.progress.update < updates:
                trainer.train()
            state = trainer.state_dict()
    end = _tensors(state["model"])
    rates = [group["options"].get("lr") for group in state["optimizer"].get("groups", ())]
    return Ended(
        sha256=digest([state["model"], state["ema"], state["progress"], state["optimizer"]["state"], rates]),
        end=end,
        moved=math.hypot(*(distance(begin[name], one) for name, one in end.items() if one.is_floating_point())),
        first=observer.first,
        gradient=observer.gradient if variant.pipeline == 1 else {},
        parts=observer.parts,
        states=observer.states,
    )


def _tensors(state: Mapping[str, Any]) -> Values:
    return {name: one.detach().clone() for name, one in state.items() if isinstance(one, Tensor)}
