"""Values of a run: its counters, its end, and its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

from evenstep.data import GlobalBatch, Position


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

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain numbers."""
        return {**self._asdict(), "position": self.position._asdict()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Progress":
        """The inverse of `state_dict`."""
        return cls(**state)._replace(position=Position(**state["position"]))


@final
@dataclass(frozen=True, slots=True)
class Result:
    """End of a training run.

    Args:
        reason: in words.
        outcome: "done" when all that was planned is done, "stopped" when something asked for it.
        requeue: the run is to be started again.
        update: committed updates.
        metrics: the last value of every metric.
    """

    reason: str = ""
    outcome: Literal["done", "stopped"] = "done"
    requeue: bool = False
    update: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction for one micro-batch.

    Args:
        output: what `Task.predict` gave, any tree; its tensors are copies on the CPU.
        samples: their numbers in the dataset, in the order of the output; empty where they have none.
        task: the name of the task; "" where a run has one task without a name.
    """

    output: Any
    samples: Sequence[int] = ()
    task: str = ""
