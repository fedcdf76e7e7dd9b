"""Counters of a run, as one immutable value."""

from typing import Any, NamedTuple

from evenstep.data import GlobalBatch, Position
from evenstep.errors import ArgumentError


class Progress(NamedTuple):
    """Counters of committed work.

    Args:
        update: the counter of schedules, seeds, checkpoints and logs.
        position: the global batch to be taken next.
        samples: samples of all committed updates, over all ranks.
        skipped: global batches that were taken but contributed to no update.

    >>> Progress().update, Progress().position
    (0, Position(epoch=0, batch=0))
    """

    update: int = 0
    position: Position = Position()
    samples: int = 0
    skipped: int = 0

    def committed(self, batch: GlobalBatch, *, skipped_samples: int = 0) -> "Progress":
        """The progress after an update of `batch`, without samples that could not be read."""
        samples = self.samples + batch.num_samples - skipped_samples
        return Progress(self.update + 1, batch.following, samples, self.skipped)

    def without(self, batch: GlobalBatch) -> "Progress":
        """The progress after `batch` was given up."""
        return self._replace(position=batch.following, skipped=self.skipped + 1)

    def check_within(self, updates: int | None, epochs: int | None) -> None:
        """Raise ArgumentError if a run of so many updates, or epochs, has fewer than are done."""
        too_long = updates is not None and self.update > updates
        if too_long or (epochs is not None and self.position > (epochs, 0)):
            raise ArgumentError(
                f"{self.update} updates are done, in epoch {self.position.epoch + 1}, but this run is to have "
                f"{updates or epochs}; ask for more `updates` or `epochs`, or go on from an earlier checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain numbers."""
        return {**self._asdict(), "position": self.position._asdict()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Progress":
        """The inverse of `state_dict`."""
        return cls(
            update=state["update"],
            position=Position(**state["position"]),
            samples=state["samples"],
            skipped=state["skipped"],
        )
