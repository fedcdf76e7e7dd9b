"""The seam through which a package computes an engine's updates in the place of `Update`.

`Training.compile` names the package; `evenstep.train.setup.COMPUTES` says which module a word means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from evenstep.data import GlobalBatch
from evenstep.events import Hook, Incident
from evenstep.train.progress import Progress
from evenstep.train.setup import Setup
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.outcome import PendingUpdate
from evenstep.train.update.update import Update


class Compute(Protocol):
    """Computes and applies updates.

    Attributes:
        reads_at_once: whether the host knows at once if an update was applied.
    """

    reads_at_once: bool

    def __call__(self, batch: GlobalBatch, before: Progress) -> PendingUpdate:
        """Execute the update that follows `before` with `batch`; see `Update`."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeParts:
    """The parts of an engine that a package builds its `Compute` from.

    Args:
        core: the engine's own `Update`, for updates that the package leaves to it.
        hooks: of the run, in order.
    """

    setup: Setup
    core: Update
    context: TrainContext
    execution: Execution
    hooks: Sequence[Hook]
    report: Callable[[Incident], None]


class ComputePackage(Protocol):
    """A module that computes updates."""

    def check(self, setup: Setup) -> None:
        """Raise ArgumentError for a run whose updates the package can't compute; nothing has been changed."""
        ...

    def build(self, parts: ComputeParts) -> Compute:
        """The engine's way to compute updates."""
        ...
