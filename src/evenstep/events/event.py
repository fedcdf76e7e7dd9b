"""What happens in a run, as values: one frozen class per moment, handed to hooks and writers.

Begin and end events come in pairs, also when something fails between them; the end event then says so in its own
words (an outcome, `committed=False`, empty metrics, no path). `update` counts committed updates: the begin and end
of the first update carry 1. Events carry no behaviour and no reference to the trainer.
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
    """Something that happened at an update; every event is one of the subclasses below.

    >>> UpdateEnd(update=1, committed=True, num_samples=32)
    UpdateEnd(update=1, committed=True, num_samples=32)
    """

    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBegin(Event):
    """Training begins, with `update` updates already committed, of `updates` planned (None: until the data ends).

    `config` is what the run was configured with, as plain values: of a run file all of it.
    """

    updates: int | None
    resumed: bool
    config: Mapping[str, Json] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEnd(Event):
    """Training ended: everything planned is done, it was asked to stop (`reason` says by what), or `error` ended it.

    `metrics` are the last values of all metrics.
    """

    outcome: Outcome
    reason: str
    error: BaseException | None
    metrics: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegin(Event):
    """Epoch `epoch` (counted from 0) begins, or goes on after a resume."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd(Event):
    """Epoch `epoch` ends; not `complete` when a stop or a failure came before its last global batch."""

    epoch: int
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBegin(Event):
    """The global batch of update `update` is here, in `num_microbatches` micro-batches over all ranks.

    `data_s` is how long the loop waited for it, in seconds; None when it was not measured. `task_data_s` is how much of
    that was for each task, where there are several.
    """

    num_microbatches: int
    data_s: float | None = None
    task_data_s: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEnd(Event):
    """Update `update` was applied (`committed`) or given up; it read `num_samples` samples over all ranks.

    `task_samples` is how many of them each task had, where there are several.
    """

    committed: bool
    num_samples: int
    task_samples: Mapping[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchBegin(Event):
    """Micro-batch `microbatch` (its number in the global batch) of `task` begins; `batch` is the collated data."""

    microbatch: int
    batch: object = field(repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchEnd(Event):
    """Micro-batch `microbatch` is done: the model's `output` and the summed `loss`; both None when it failed.

    The `loss` is also None where the task gave none.
    """

    microbatch: int
    batch: object = field(repr=False, compare=False)
    output: object = field(repr=False, compare=False)
    loss: Tensor | None = field(repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBegin(Event):
    """Micro-batch `microbatch` of `task` goes into the model: `batch` is on the device, with the task's transforms."""

    microbatch: int
    batch: object = field(repr=False, compare=False)
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardEnd(Event):
    """The forward of micro-batch `microbatch` ends: the `output` after `Task.postprocess`; None when it failed."""

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

    What is then in `.grad` is `divisor` times the gradient, and not clipped: by the loss scale, and by a weight that
    was late. What is changed there, or put there, is what the optimizer gets, divided and clipped; the norm that clips,
    and that must be finite, is still that of the gradient as it came.
    """

    divisor: float | Tensor = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd(Event):
    """The optimizer is done with update `update`; whether it was applied is what `UpdateEnd` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateBegin(Event):
    """Evaluation `name` begins after `update` updates."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateEnd(Event):
    """Evaluation `name` ends; `metrics` by full name, as logged (`valid/loss`), and empty when it failed."""

    name: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegin(Event):
    """A checkpoint of the state after `update` updates is about to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnd(Event):
    """The checkpoint is complete at `path`, or there is none (`path` is None) because the save failed."""

    path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Event):
    """Anything that went wrong, as a value: its `kind` (`out_of_memory`, `non_finite`, …), a sentence, and facts.

    Args:
        kind: what policies and readers go by.
        message: for the person who reads it.
        details: further facts.
        rank: on which it happened; None when all ranks agreed that it did.
        microbatch: in which, by its number in the global batch.
        stage: of the model, in which.
        samples: the dataset's numbers of the samples that it is about, where they are known.
        tensors: the names of those that it is about.
        traceback: of what was raised, or "".

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
        for name in ("message", "traceback"):  # of what others have raised, in whatever words
            object.__setattr__(self, name, keepable(getattr(self, name)))

    def facts(self) -> dict[str, Json]:
        """All that is known but kind, message and traceback, as JSON.

        >>> Incident(kind="x", update=7, message="", details={"scale": 2.0}, rank=1, samples=(4,)).facts()
        {'update': 7, 'rank': 1, 'samples': [4], 'scale': 2.0}
        """
        places: dict[str, Json] = {"rank": self.rank, "microbatch": self.microbatch, "stage": self.stage}
        lists: dict[str, Json] = {"samples": list(self.samples), "tensors": list(self.tensors)}
        known = {name: value for name, value in (places | lists).items() if value is not None and value != []}
        return {"update": self.update, **known, **self.details}
