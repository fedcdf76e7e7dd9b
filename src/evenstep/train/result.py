"""How a call of `train` ended, as a value."""

from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How training ended.

    Args:
        update: committed updates.
        outcome: "done" when all that was planned is done, "stopped" when something asked for it.
        reason: in words.
        metrics: the last value of every metric.
        requeue: whether it was stopped by something that wants it to be run again.
    """

    update: int
    outcome: Literal["done", "stopped"]
    reason: str
    metrics: dict[str, float]
    requeue: bool = False
