"""Trains a variant of a run for some updates, and says what it has come to."""

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep.data import Data, GlobalBatch
from evenstep.errors import EvenstepError
from evenstep.events import BackwardBegin, Hook, SaveEnd, StepBegin, UpdateEnd
from evenstep.tools.prove.digest import sha256_of
from evenstep.tools.prove.formats import Laboratory, wide_defaults
from evenstep.tools.prove.subject import Ended, Subject, Variant


class RefusedError(EvenstepError):
    """A variant that this run can't have, as what builds it says."""


@final
class StopAt(Hook):
    """Stops a run after so many updates of its whole length, which its LR schedule goes on counting with."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def after_update(self, event: UpdateEnd) -> None:
        if event.update >= self._updates:
            self.trainer.request_stop("enough to compare")


@final
class Listen(Hook):
    """Keeps the gradient of the first update."""

    def __init__(self) -> None:
        self.gradient: dict[str, Tensor] = {}

    def before_step(self, event: StepBegin) -> None:
        if event.update == 1:
            self.gradient = gradients_of(self.trainer.model, event.divisor)


@final
class Rounding(Hook):
    """Moves every gradient by as much as another order of its sums might: g + ε (|g| + rms of all) · u, u in [-1, 1].

    What steps make of that is what they make of rounding; those that take a sign make very much of it.
    """

    def before_step(self, event: StepBegin) -> None:
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
    """Kills the process at the last micro-batch of an update, without a chance to tidy up."""

    def __init__(self, update: int) -> None:
        self._update = update
        self._saved = False

    def after_update(self, event: UpdateEnd) -> None:
        if event.update == max(1, self._update - 1):
            self.trainer.request_save()

    def after_save(self, event: SaveEnd) -> None:
        self._saved = self._saved or event.path is not None

    def before_backward(self, event: BackwardBegin) -> None:
        if event.update == self._update and self._saved:
            os.kill(os.getpid(), signal.SIGKILL)


def gradients_of(model: nn.Module, divisor: float | Tensor) -> dict[str, Tensor]:
    """The gradients of parameters that this process holds whole, by name; none where any is in shards."""
    held = {name: one for name, one in model.named_parameters() if one.grad is not None}
    if any(hasattr(one, "to_local") for one in held.values()):
        return {}
    return {name: cast("Tensor", one.grad).detach().clone() / divisor for name, one in held.items()}


def run_once(
    open_subject: Callable[[Variant], AbstractContextManager[Subject]],
    variant: Variant,
    *,
    updates: int,
    hooks: Callable[[Subject], Sequence[Hook]] = lambda subject: (),
    folder: Path | None = None,
    data: Callable[[Data], Data] = lambda data: data,
    own_hooks: bool = True,
) -> Ended:
    """Build a variant, and train it for so many updates.

    Args:
        folder: that it saves in, and goes on from where there is something.
    """
    with open_subject(variant) as subject:
        source = data(subject.data)
        if variant.wide:
            widen(subject)
            source = wide_data(source)
        listen = Listen()
        more = [Laboratory(wide=variant.wide, still=variant.still), listen, StopAt(updates), *hooks(subject)]
        trainer = subject.trainer(source, [*(subject.hooks if own_hooks else ()), *more], folder)
        with closing(source):
            begin = _tensors(trainer.state_dict()["model"])
            if folder is not None:
                trainer.resume("auto")
            with wide_defaults(wide=variant.wide):
                if trainer.progress.update < updates:
                    trainer.train()
            state = trainer.state_dict()
    rates = [group["options"].get("lr") for group in state["optimizer"].get("groups", ())]
    parts = [state["model"], state["ema"], state["progress"], state["optimizer"]["state"], rates]
    return Ended(sha256=sha256_of(parts), begin=begin, end=_tensors(state["model"]), gradient=listen.gradient)


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in state.items() if isinstance(one, Tensor)}


def widen(subject: Subject) -> None:
    """Put a model, and what its optimizer has of it already, into float64."""
    subject.model.double()
    for state in subject.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                state[name] = value.double()


def through(data: Data, change: Callable[[GlobalBatch], None]) -> Data:
    """The same data, each of whose global batches is given to `change` as it comes."""

    def changed(read: Callable[..., Iterator[GlobalBatch]]) -> Callable[..., Iterator[GlobalBatch]]:
        def batches(*args: Any, **options: Any) -> Iterator[GlobalBatch]:
            with closing(cast("Any", read(*args, **options))) as given:
                for batch in given:
                    change(batch)
                    yield batch

        return batches

    together, alone = data.batches_together, data.batches
    vars(data)["batches"] = changed(alone)
    if type(data).batches_together is not Data.batches_together:  # which calls `batches`
        vars(data)["batches_together"] = changed(together)
    return data


def wide_data(data: Data) -> Data:
    """The same data, with their floating-point numbers in float64."""

    def change(batch: GlobalBatch) -> None:
        for one in batch.microbatches:
            one.data = widened(one.data)

    return through(data, change)


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
