"""Moments of a run as values: one frozen class per moment, given to hooks and writers.

Begin and end events come in pairs, also on failure; the end event then says so (an outcome, `committed=False`, empty
metrics, no path). `update` counts committed updates: the begin and end events of the first update carry 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from torch import Tensor

from evenstep.errors import keepable

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Outcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events.

    >>> UpdateEnd(update=1, committed=True, num_samples=32)
    UpdateEnd(update=1, committed=True, num_samples=32)
    """

    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBegin(Event):
    """Training begins after `update` of `updates` planned updates (None: until the data ends).

    `config` is the configuration of the run as plain values.
    """

    updates: int | None
    resumed: bool
    config: Mapping[str, Json] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEnd(Event):
    """Training ended: all planned updates are done, a stop was requested (`reason`), or `error` ended it.

    `metrics` are the last values of all metrics.
    """

    outcome: Outcome
    reason: str
    error: BaseException | None
    metrics: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegin(Event):
    """Epoch `epoch`, counted from 0, begins, or continues after a resume."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd(Event):
    """Epoch `epoch` ends; it is not `complete` if a stop or a failure came before its last global batch."""

    epoch: int
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBegin(Event):
    """Update `update` begins, with `num_microbatches` micro-batches over all ranks.

    `data_s` is the time that the loop waited for the global batch, in seconds; None if it was not measured.
    `task_data_s` is the part of each task, if there are several.
    """

    num_microbatches: int
    data_s: float | None = None
    task_data_s: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEnd(Event):
    """Update `update` was applied (`committed`) or given up; it read `num_samples` samples over all ranks.

    `task_samples` are the samples of each task, if there are several.
    """

    committed: bool
    num_samples: int
    task_samples: Mapping[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBegin(Event):
    """Micro-batch `microbatch` of `task`, numbered in the global batch, begins; `batch` is the collated data."""

    microbatch: int
    batch: object = field(repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchEnd(Event):
    """Micro-batch `microbatch` ends, with the model's `output` and the summed `loss`; both are None if it failed.

    `loss` is also None if the task gave none.
    """

    microbatch: int
    batch: object = field(repr=False, compare=False)
    output: object = field(repr=False, compare=False)
    loss: Tensor | None = field(repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBegin(Event):
    """The forward of micro-batch `microbatch` begins; `batch` is transformed and on the device."""

    microbatch: int
    batch: object = field(repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardEnd(Event):
    """The forward of micro-batch `microbatch` ends; `output`, after `Task.postprocess`, is None if it failed."""

    microbatch: int
    output: object = field(repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBegin(Event):
    """The backward of micro-batch `microbatch` begins."""

    microbatch: int
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardEnd(Event):
    """The backward of micro-batch `microbatch` ends."""

    microbatch: int
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegin(Event):
    """The gradients of update `update` are complete, and the optimizer is about to apply them.

    `.grad` holds `divisor` times the gradient (loss scale, late weight), not yet clipped. Changes to `.grad` reach the
    optimizer, divided and clipped. The norm that clips, and that must be finite, is the norm before the changes.
    """

    divisor: float | Tensor = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd(Event):
    """The optimizer is done with update `update`; `UpdateEnd` says whether it was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateBegin(Event):
    """Evaluation `name` begins after `update` updates."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateEnd(Event):
    """Evaluation `name` ends; `metrics` by full name, such as `valid/loss`, are empty if it failed."""

    name: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegin(Event):
    """A checkpoint of the state after `update` updates is about to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnd(Event):
    """The checkpoint is complete at `path`; `path` is None if the save failed."""

    path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Event):
    """Anything that went wrong, as a value.

    Args:
        kind: such as `out_of_memory` or `non_finite`; policies and readers select by it.
        message: one sentence for people.
        details: further facts.
        rank: rank on which it happened; None if all ranks agreed on it.
        microbatch: number of the micro-batch in the global batch.
        stage: stage of the model.
        samples: numbers of the samples in the dataset.
        tensors: names of tensors.
        traceback: traceback of the error, or "".

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
        """All known facts but kind, message and traceback, as JSON.

        >>> Incident(kind="x", update=7, message="", details={"scale": 2.0}, rank=1, samples=(4,)).facts()
        {'update': 7, 'rank': 1, 'samples': [4], 'scale': 2.0}
        """
        places: dict[str, Json] = {"rank": self.rank, "microbatch": self.microbatch, "stage": self.stage}
        lists: dict[str, Json] = {"samples": list(self.samples), "tensors": list(self.tensors)}
        known = {name: value for name, value in (places | lists).items() if value is not None and value != []}
        return {"update": self.update, **known, **self.details}
