"""What one rank does in one update, as data.

A plan is a tuple of actions in the order in which a rank executes them. It is a value: it can be compared,
printed, proved by `evenstep.pipeline.check` and executed by `evenstep.pipeline.runner`. It is not a graph of
dependencies between ranks; those follow from the stages that the actions name.
"""

from dataclasses import dataclass
from enum import Enum
from typing import final


@final
class Op(Enum):
    """The kinds of action. The value is the letter by which plans are written and drawn."""

    FORWARD = "F"
    BACKWARD = "B"
    ARM = "A"
    REDUCE = "R"


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    Args:
        op: what to do. ARM tells the strategy that the next backward of `stage` is its last of this update,
            REDUCE that the stage's gradients are complete and may be summed over data-parallel ranks.
        stage: number of the stage in the whole model, counted from 0.
        microbatch: global number of the micro-batch; -1 for ARM and REDUCE, which concern the whole stage.

    >>> str(Action(Op.FORWARD, 0, 3)), str(Action(Op.REDUCE, 1))
    ('0F3', '1R')
    """

    op: Op
    stage: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch if self.microbatch >= 0 else ''}"


Plan = tuple[Action, ...]
