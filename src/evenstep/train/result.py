"""Results of `Trainer.train` and `Trainer.predict`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """End of a training run.

    Args:
        update: committed updates.
        outcome: "done" when all that was planned is done, "stopped" when something asked for it.
        reason: in words.
        metrics: the last value of every metric.
        requeue: the run is to be started again.
    """

    update: int
    outcome: Literal["done", "stopped"]
    reason: str
    metrics: dict[str, float]
    requeue: bool = False


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
