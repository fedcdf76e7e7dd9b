"""Trains a variant of a run for some updates."""

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep.data import Data, GlobalBatch, ReadOptions
from evenstep.events import Hook, MicrobatchEvent, SaveEvent, StepEvent, UpdateEvent
from evenstep.tools.prove.formats import Laboratory, wide_defaults
from evenstep.tools.prove.state import sha256_of
from evenstep.tools.prove.subject import Ended, Open, Subject, Variant


@final
class Observer(Hook):
    """Computes updates as the variant says, keeps the gradient of the first one, and stops after some.

    The run keeps its whole length, which its LR schedule counts with.
    """

    priority = -1_000_000

    def __init__(self, variant: Variant, updates: int) -> None:
        self._variant, self._updates = variant, updates
        self._inside: Laboratory | None = None
        self.gradient: dict[str, Tensor] = {}

    def before_update(self, event: UpdateEvent) -> None:
        if self._variant.wide or self._variant.still:
            self._inside = Laboratory(wide=self._variant.wide, still=self._variant.still)
            self._inside.__enter__()

    def after_update(self, event: UpdateEvent) -> None:
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None
        if event.update >= self._updates:
            self.trainer.request_stop("enough to compare")

    def before_step(self, event: StepEvent) -> None:
        if event.update == 1:
            self.gradient = gradients_of(self.trainer.model, event.divisor)


@final
class Rounding(Hook):
    """Changes every gradient as another order of its sums might: g + ε (|g| + rms of all) · u, u in [-1, 1]."""

    def before_step(self, event: StepEvent) -> None:
        held = [one.grad for one in self.trainer.model.parameters() if one.grad is not None]
        count = sum(one.numel() for one in held)
        if count == 0:
            return
        size = math.sqrt(sum(float(one.double().square().sum()) for one in held) / count)
        generator = torch.Generator().manual_seed(event.update)
        for one in held:
            chance = 2 * torch.rand(one.shape, generator=generator, dtype=one.dtype) - 1
            one.add_((one.abs() + size) * chance, alpha=torch.finfo(one.dtype).eps)


@final
class KillAt(Hook):
    """Kills the process in a backward of an update, after a checkpoint of an earlier one."""

    def __init__(self, update: int) -> None:
        self._update = update
        self._saved = False

    def after_update(self, event: UpdateEvent) -> None:
        if event.update == max(1, self._update - 1):
            self.trainer.request_save()

    def after_save(self, event: SaveEvent) -> None:
        self._saved = self._saved or event.path is not None

    def before_backward(self, event: MicrobatchEvent) -> None:
        if event.update == self._update and self._saved:
            os.kill(os.getpid(), signal.SIGKILL)


def gradients_of(model: nn.Module, divisor: float | Tensor) -> dict[str, Tensor]:
    """Gradients of parameters that this process holds whole, by name; none where any is in shards."""
    held = {name: one for name, one in model.named_parameters() if one.grad is not None}
    if any(hasattr(one, "to_local") for one in held.values()):
        return {}
    return {name: cast("Tensor", one.grad).detach().clone() / divisor for name, one in held.items()}


def run_once(
    open_subject: Open,
    variant: Variant,
    *,
    updates: int,
    hooks: Callable[[Subject], Sequence[Hook]] = lambda subject: (),
    folder: Path | None = None,
    own_hooks: bool = True,
) -> Ended:
    """Build a variant and train it until so many updates are done.

    Args:
        folder: saves there, and resumes from its newest checkpoint.
    """
    with open_subject(variant) as subject:
        source = subject.data
        if variant.wide:
            widen(subject)
            source = wide_data(source)
        observer = Observer(variant, updates)
        own = subject.hooks if own_hooks else ()
        trainer = subject.trainer(source, [*own, observer, *hooks(subject)], folder)
        with closing(source), wide_defaults(wide=variant.wide):
            begin = _tensors(trainer.state_dict()["model"])
            if folder is not None:
                trainer.resume("auto")
            if trainer.progress.update < updates:
                trainer.train()
            state = trainer.state_dict()
    rates = [group["options"].get("lr") for group in state["optimizer"].get("groups", ())]
    parts = [state["model"], state["ema"], state["progress"], state["optimizer"]["state"], rates]
    return Ended(sha256=sha256_of(parts), begin=begin, end=_tensors(state["model"]), gradient=observer.gradient)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in state.items() if isinstance(one, Tensor)}


def widen(subject: Subject) -> None:
    """Put a model, and the state that its optimizer already has, into float64."""
    subject.model.double()
    for state in subject.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                state[name] = value.double()


def wide_data(data: Data) -> Data:
    """The same data, with floating-point numbers in float64."""

    read = data.batches

    def batches(options: ReadOptions) -> Iterator[GlobalBatch]:
        with closing(cast("Any", read(options))) as given:
            for batch in given:
                for one in batch.microbatches:
                    one.data = widened(one.data)
                yield batch

    vars(data)["batches"] = batches
    return data


def widened(value: Any) -> Any:
    """A batch with its floating-point tensors in float64.

    >>> widened([torch.zeros(1), {"a": 1}])
    [tensor([0.], dtype=torch.float64), {'a': 1}]
    """
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)({key: widened(one) for key, one in cast("dict[Any, Any]", value).items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(widened, cast("tuple[Any, ...]", value)))
    if isinstance(value, list | tuple):
        return type(value)(map(widened, cast("Any", value)))
    for name, inner in list(vars(value).items()) if hasattr(value, "__dict__") else []:
        if (wide := widened(inner)) is not inner:
            setattr(value, name, wide)
    return value
