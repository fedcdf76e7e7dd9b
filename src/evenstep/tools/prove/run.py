"""Makes one run of the user's model and data, computed as a variant says, and keeps its result."""

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data import Data, GlobalBatch, ReadOptions
from evenstep.data.tree import is_container, rebuilt
from evenstep.errors import EvenstepError
from evenstep.events import Hook, MicrobatchEvent, SaveEvent, StepEvent, UpdateEvent
from evenstep.optim.schedules import LrSchedule
from evenstep.tools.prove.laboratory import Laboratory, wide_defaults
from evenstep.tools.prove.state import Values, distance, sha256_of
from evenstep.tools.prove.trace import Tracer, UpdateTrace, gradients_of
from evenstep.train import Task, Trainer

Cut = Literal["1", "2", "4", "ragged"]


class RefusedError(EvenstepError):
    """A variant that is refused for this run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compute the run.

    Args:
        cut: micro-batches of a global batch; "ragged" are of different sizes.
        wide: compute in float64.
        own_format: compute in the run's own number format, else in float32 (`wide`: float64).
        still: replace random numbers by constants, so that micro-batches can be compared.
        fast: sum gradients as they come, not in the order that is the same on any number of ranks.
        rounds: change each gradient as another order of its sums might.
        pipeline: ranks that share a model in stages.
    """

    cut: Cut = "4"
    wide: bool = False
    own_format: bool = True
    still: bool = False
    fast: bool = False
    rounds: bool = False
    strategy: str = "single"
    ranks: int = 1
    pipeline: int = 1
    checks_loss: bool = False
    own_hooks: bool = True
    workers: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Objects of a variant before training.

    Args:
        tasks: by name; "" in a run with one.
        coefficients: λ of each task; None where they are learned, or gradients are combined in another way.
    """

    model: nn.Module
    tasks: Mapping[str, Task]
    optimizer: Optimizer
    data: Data
    hooks: Sequence[Hook]
    trainer: Callable[[Data, Sequence[Hook], Path | None], Trainer]
    updates: int | None
    coefficients: Mapping[str, float] | None = field(default_factory=dict[str, float])
    lr_schedule: LrSchedule | None = None
    clip_norm: float | None = None

    def tracer(self, update: int) -> Tracer:
        """Recorder of an update, and of state in the attributes of all objects."""
        tasks = {f"task {name}".rstrip(): task for name, task in self.tasks.items()}
        hooks = {f"hook {hook.name}": hook for hook in self.hooks}
        others = {"optimizer": self.optimizer, "lr_schedule": self.lr_schedule, "data": self.data}
        return Tracer(self.model, self.tasks, {"model": self.model, **tasks, **hooks, **others}, update)


Open = Callable[[Variant], AbstractContextManager[Subject]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a run.

    Args:
        sha256: of all that training changes.
        gradient: of the first update, by parameter; empty where parameters are sharded or in stages.
        trace: the last update, if it was asked for.
    """

    sha256: str
    begin: Values
    end: Values
    gradient: Values = field(default_factory=dict[str, Tensor])
    trace: UpdateTrace | None = None

    @property
    def moved(self) -> float:
        """Distance from the begin of the run to its end."""
        floats = {name: one for name, one in self.end.items() if one.is_floating_point()}
        return math.hypot(*(distance(self.begin[name], one) for name, one in floats.items()))


@final
class Observer(Hook):
    """Computes updates as the variant says, keeps the gradient of the first one, and stops after `updates`.

    The run keeps its whole length, which its LR schedule counts with. In the backward of update `kill_at` it kills the
    process, once a checkpoint is there.
    """

    priority = -1_000_000

    def __init__(self, variant: Variant, updates: int, kill_at: int | None, began: Callable[[], object]) -> None:
        self._variant = variant
        self._updates = updates
        self._kill_at = kill_at
        self._began = began
        self._saved = False
        self._inside: Laboratory | None = None
        self.gradient: Values = {}

    def before_update(self, event: UpdateEvent) -> None:
        self._began()
        if self._variant.wide or self._variant.still:
            self._inside = Laboratory(wide=self._variant.wide, still=self._variant.still)
            self._inside.__enter__()

    def before_backward(self, event: MicrobatchEvent) -> None:
        if event.update == self._kill_at and self._saved:
            os.kill(os.getpid(), signal.SIGKILL)

    def before_step(self, event: StepEvent) -> None:
        if event.update == 1:
            self.gradient = gradients_of(self.trainer.model, event.divisor)
        if self._variant.rounds:
            _round([one.grad for one in self.trainer.model.parameters() if one.grad is not None], event.update)

    def after_update(self, event: UpdateEvent) -> None:
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None
        if self._kill_at is not None and event.update == max(1, self._kill_at - 1):
            self.trainer.request_save()
        if event.update >= self._updates:
            self.trainer.request_stop("enough to compare")

    def after_save(self, event: SaveEvent) -> None:
        self._saved = self._saved or event.path is not None


def _round(gradients: Sequence[Tensor], seed: int) -> None:
    """Change gradients as another order of their sums might: g + ε (|g| + rms of all) · u, u in [-1, 1]."""
    count = sum(one.numel() for one in gradients)
    size = math.sqrt(sum(float(one.double().square().sum()) for one in gradients) / max(count, 1))
    generator = torch.Generator().manual_seed(seed)
    for one in gradients:
        chance = 2 * torch.rand(one.shape, generator=generator, dtype=one.dtype) - 1
        one.add_((one.abs() + size) * chance, alpha=torch.finfo(one.dtype).eps)


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
        traces: record the last update.
        began: called as an update begins.
    """
    with open_subject(variant) as subject:
        if variant.wide:
            widen(subject)
        observer = Observer(variant, updates, kill_at, began)
        tracers = [subject.tracer(updates)] if traces else []
        trainer = subject.trainer(
            subject.data, [*(subject.hooks if variant.own_hooks else ()), observer, *tracers], folder
        )
        with closing(subject.data), wide_defaults(wide=variant.wide):
            begin = _tensors(trainer.state_dict()["model"])
            if folder is not None:
                trainer.resume("auto")
            if trainer.progress.update < updates:
                trainer.train()
            state = trainer.state_dict()
    rates = [group["options"].get("lr") for group in state["optimizer"].get("groups", ())]
    return Ended(
        sha256=sha256_of([state["model"], state["ema"], state["progress"], state["optimizer"]["state"], rates]),
        begin=begin,
        end=_tensors(state["model"]),
        gradient=observer.gradient,
        trace=tracers[0].made if tracers else None,
    )


def _tensors(state: Mapping[str, Any]) -> Values:
    return {name: one.detach().clone() for name, one in state.items() if isinstance(one, Tensor)}


def widen(subject: Subject) -> None:
    """Put a model, its data, and the state that its optimizer already has, into float64."""
    subject.model.double()
    for state in subject.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                state[name] = value.double()
    widen_data(subject.data)


def widen_data(data: Data) -> None:
    """Have data give floating-point numbers in float64."""
    read = data.batches

    def batches(options: ReadOptions) -> Iterator[GlobalBatch]:
        with closing(cast("Any", read(options))) as given:
            for batch in given:
                for one in batch.microbatches:
                    one.data = _widened(one.data)
                yield batch

    vars(data)["batches"] = batches


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if is_container(value):
        return rebuilt(value, _widened)
    for name, inner in list(vars(value).items()) if hasattr(value, "__dict__") else []:
        setattr(value, name, _widened(inner))
    return value
