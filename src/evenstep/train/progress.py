"""How far a run is: the counters, as one immutable value.

`update` is the only counter that schedules, seeds, checkpoints and logs count in; `position` says which global batch
is next. They differ by the global batches that were skipped. It holds no clock: a resumed run goes on exactly.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, final

from evenstep.data import GlobalBatch, Position


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of committed work.

    Args:
        position: the global batch to be taken next.
        samples: samples of all committed updates, over all ranks.
        skipped: global batches that were taken but contributed to no update.

    >>> Progress().update, Progress().position
    (0, Position(epoch=0, batch=0))
    """

    update: int = 0
    position: Position = field(default_factory=Position)
    samples: int = 0
    skipped: int = 0

    def committed(self, batch: GlobalBatch, *, skipped_samples: int = 0) -> Self:
        """The progress after an update of `batch`, without samples that could not be read."""
        return type(self)(
            update=self.update + 1,
            position=batch.following,
            samples=self.samples + batch.num_samples - skipped_samples,
            skipped=self.skipped,
        )

    def without(self, batch: GlobalBatch) -> Self:
        """The progress after `batch` was given up."""
        return replace(self, position=batch.following, skipped=self.skipped + 1)

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain numbers."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """The inverse of `state_dict`."""
        return cls(
            update=state["update"],
            position=Position(**state["position"]),
            samples=state["samples"],
            skipped=state["skipped"],
        )
