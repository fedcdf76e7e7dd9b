"""A run that is built again and again, each time cut, shared or computed in another way."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.errors import EvenstepError
from evenstep.events import Hook
from evenstep.optim.schedules import LrSchedule
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
        ordered: sum gradients in the order that is the same on any number of ranks.
        pipeline: ranks that share a model in stages.
    """

    cut: Cut = "4"
    wide: bool = False
    own_format: bool = True
    still: bool = False
    ordered: bool = False
    strategy: str = "single"
    ranks: int = 1
    pipeline: int = 1
    checks_loss: bool = False
    workers: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A variant as it was built, before training.

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a run.

    Args:
        sha256: of all that training changes.
        gradient: of the first update, by parameter; empty where parameters are sharded or in stages.
    """

    sha256: str
    begin: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


Open = Callable[[Variant], AbstractContextManager[Subject]]


class InProcesses(Protocol):
    """Runs a variant in processes of its own; gives None if it was killed."""

    def __call__(
        self, variant: Variant, *, updates: int, folder: Path | None = None, kill_at: int | None = None
    ) -> Ended | None: ...

    def traced(self, variant: Variant, update: int) -> Any:
        """Trace of one update over all ranks."""
        ...
