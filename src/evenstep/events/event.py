"""Events of a run as values, for hooks and writers; the events of the first update carry `update = 1`.

The `before_` method of a part gets an event of what begins, the `after_` method one of how it ended, also on failure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor

from evenstep.errors import keepable

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Outcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvent(Event):
    """Training, after `update` updates.

    Before: `updates` planned updates (None: until the data ends), and `config`, the configuration as plain values.
    After: the outcome and its reason, the error that ended it, and the last values of all metrics.
    """

    updates: int | None = None
    resumed: bool = False
    config: Mapping[str, Json] = field(default_factory=dict, repr=False)
    outcome: Literal["running"] | Outcome = "running"
    reason: str = ""
    error: BaseException | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEvent(Event):
    """Epoch `epoch`, counted from 0; after it, `complete` is False if a stop or a failure came first."""

    epoch: int
    complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEvent(Event):
    """Update `update`, with `num_microbatches` micro-batches over all ranks.

    After: `committed` is True if the update was applied, and `num_samples` counts its samples over all ranks.
    """

    num_microbatches: int = 0
    committed: bool = False
    num_samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchEvent(Event):
    """Micro-batch `microbatch` of `task`, numbered in the global batch, or its forward or backward.

    `batch` is the collated data, in events of the forward on the device and transformed. `output` is the output of the
    model, `loss` the summed loss; both are None before, on failure and in backwards.
    """

    microbatch: int
    batch: Any = field(default=None, repr=False, compare=False)
    output: Any = field(default=None, repr=False, compare=False)
    loss: Tensor | None = field(default=None, repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Event):
    """The optimizer's step: before it, the gradients of update `update` are complete.

    `.grad` holds `divisor` times the gradient (loss scale, late weight), not yet clipped. Changes to `.grad` reach the
    optimizer, divided and clipped. The norm that clips, and that must be finite, is the norm before the changes.
    """

    divisor: float | Tensor = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateEvent(Event):
    """Evaluation `name`; after it, `metrics` by full name, such as `valid/loss`, are empty if it failed."""

    name: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent(Event):
    """A checkpoint of the state after `update` updates; after it, `path` is None if the save failed."""

    path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Event):
    """Anything that went wrong, as a value.

    Args:
        kind: such as `out_of_memory` or `non_finite`; policies and readers select by it.
        message: one sentence for people.
        details: further facts.
        rank: rank on which it happened; None if all ranks agreed on it.
        microbatch: number of the micro-batch in the global batch.
        samples: numbers of the samples in the dataset.

    >>> Incident(kind="overflow", update=7, message="the loss scale was halved", details={"scale": 32768.0}).kind
    'overflow'
    """

    kind: str
    message: str
    details: Mapping[str, Json] = field(default_factory=dict)
    rank: int | None = None
    microbatch: int | None = None
    stage: int | None = None
    samples: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    traceback: str = ""

    def __post_init__(self) -> None:
        for name in ("message", "traceback"):  # may hold an error of the user, of any length
            object.__setattr__(self, name, keepable(getattr(self, name)))

    def facts(self) -> dict[str, Json]:
        """All known facts but kind, message and traceback, as JSON."""
        places: dict[str, Json] = {"rank": self.rank, "microbatch": self.microbatch, "stage": self.stage}
        lists: dict[str, Json] = {"samples": list(self.samples), "tensors": list(self.tensors)}
        known = {name: value for name, value in (places | lists).items() if value not in (None, [])}
        return {"update": self.update, **known, **self.details}
