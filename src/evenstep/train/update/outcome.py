"""Outcome of an update: `Committed`, or `Aborted` with an incident; a `PendingUpdate` until it is known."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from evenstep.data import GlobalBatch
from evenstep.events import Incident
from evenstep.parallel import Group
from evenstep.tensors import scalar_on
from evenstep.train.progress import Progress


class Passes(NamedTuple):
    """Results of an update's micro-batches.

    Args:
        losses: summed losses of this rank with the names of their tasks, by the micro-batches' numbers.
        total: Σw over all ranks; a tensor where a weight is late.
        divisor: by which the gradients are still to be divided, beside the loss scale.
    """

    losses: dict[int, tuple[str, Tensor]]
    total: float | Tensor
    divisor: float | Tensor = 1.0


@final
@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every update, and freezing costs
class PendingUpdate:
    """One dispatched update, whose verdict may be on the device still.

    Args:
        before, loss_scale, rates: counters, state of the loss scale, and learning rates before it.
        aborted: 0.0 when it was applied, 1.0 when not; a tensor while only the device knows.
        total: Σw of the update; a tensor where the weight is late.
        norm: ‖g‖₂ before clipping; None where there is no gradient.
        skipped_samples: number of samples that all ranks have left out.
        losses: see `Passes`.
    """

    batch: GlobalBatch
    before: Progress
    loss_scale: dict[str, float | int]
    rates: Sequence[float]
    aborted: float | Tensor = 1.0
    total: float | Tensor = 0.0
    norm: float | Tensor | None = None
    skipped_samples: int = 0
    losses: dict[int, tuple[str, Tensor]] = field(default_factory=dict[int, tuple[str, Tensor]])

    @property
    def number(self) -> int:
        """Number of the update."""
        return self.before.update + 1

    @property
    def is_known_aborted(self) -> bool:
        return isinstance(self.aborted, float) and self.aborted > 0


def first_aborted(updates: Sequence[PendingUpdate]) -> int | None:
    """The index of the first update that was aborted: one read from the device at most."""
    on_device = [one.aborted for one in updates if isinstance(one.aborted, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    verdicts = [next(read) if isinstance(one.aborted, Tensor) else one.aborted for one in updates]
    return next((index for index, verdict in enumerate(verdicts) if verdict), None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """An update that was applied; its numbers, of the whole global batch, stay on the device until they are read.

    Args:
        update: number of the update, counted from 1.
        skipped_samples: number of samples that could not be read, on all ranks.
    """

    update: int
    skipped_samples: int = 0
    _norm: float | Tensor = field(repr=False)
    _weight: float | Tensor = field(repr=False)
    _loss: Callable[[], float] = field(repr=False)
    _metrics: Callable[[], Mapping[str, float]] = field(repr=False)

    @property
    def loss(self) -> float:
        """Σ of the summed losses / Σ of the weights."""
        return self._loss()

    @property
    def grad_norm(self) -> float:
        """‖g‖₂ before it was clipped."""
        return float(self._norm)

    @property
    def weight(self) -> float:
        """Σ of the weights, of all tasks: how many units the losses cover."""
        return float(self._weight)

    def metrics(self) -> Mapping[str, float]:
        """All metrics of the update by name, `loss` among them: Σ sums / Σ weights over all ranks.

        All ranks call it together, before the next update; it is empty afterwards.
        """
        return self._metrics()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """An update that was not applied: parameters, buffers, optimizer and counters are as before it.

    Args:
        incident: why, the same on all ranks: `incident.kind` is "non_finite", "no_weight" or "overflow".
        since: the global batches of the updates that were dispatched after it; they were not applied either.
    """

    incident: Incident
    pending: PendingUpdate = field(repr=False)
    since: tuple[GlobalBatch, ...] = field(default=(), repr=False)


@final
class SummedLoss:
    """Σ sums / Σ weights over all ranks: summed from now on, waited for when it is read.

    Args:
        numbers: this rank's sums and weights, in turn.

    >>> SummedLoss([torch.tensor(6.0), 2.0], Group())()
    3.0
    """

    def __init__(self, numbers: Sequence[Tensor | float], group: Group) -> None:
        self._numbers = numbers
        self._pair = _pair_of(numbers) if group.ranks > 1 else None  # one rank sums at a read: 40 µs an update
        self._wait = None if self._pair is None else group.sum(self._pair)

    def finish(self) -> None:
        """Wait until all ranks have the sums."""
        if self._wait is not None:
            self._wait()
            self._wait = None

    def __call__(self) -> float:
        self.finish()
        pair = _pair_of(self._numbers) if self._pair is None else self._pair
        total, weight = cast("list[float]", pair.tolist())
        return total / weight if weight else math.nan


def _pair_of(numbers: Sequence[Tensor | float]) -> Tensor:
    device = next((one.device for one in numbers if isinstance(one, Tensor)), torch.device("cpu"))
    wide = torch.float32 if device.type == "mps" else torch.float64
    if not numbers:
        return torch.zeros(2, dtype=wide, device=device)
    return torch.stack([scalar_on(one, device, wide) for one in numbers]).view(-1, 2).sum(0)
