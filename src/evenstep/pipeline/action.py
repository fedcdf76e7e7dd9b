"""Actions of one rank in one update, as data.

A plan is a tuple of actions in the order in which a rank executes them.
"""

from dataclasses import dataclass
from enum import Enum
from typing import final


@final
class Op(Enum):
    """The kinds of action. The value is the letter by which plans are written and drawn."""

    FORWARD = "F"
    BACKWARD = "B"  # whole: gradients of inputs and of weights
    INPUT_BACKWARD = "I"  # gradients of inputs only; those of weights follow in WEIGHT_BACKWARD
    WEIGHT_BACKWARD = "W"
    SEND_OUTPUT = "SO"
    RECEIVE_INPUT = "RI"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    ARM = "A"
    REDUCE = "R"
    UNSHARD = "US"
    RESHARD = "RS"

    # enum's own hash runs Python code, and checks hash millions of actions
    __hash__ = object.__hash__


COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)

WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_BACKWARD: "backward to the inputs",
    Op.WEIGHT_BACKWARD: "backward to the weights",
    Op.SEND_OUTPUT: "sending the output",
    Op.RECEIVE_INPUT: "receiving the input",
    Op.SEND_GRADIENT: "sending the gradient",
    Op.RECEIVE_GRADIENT: "receiving the gradient",
    Op.ARM: "arming the reduction",
    Op.REDUCE: "reduction",
    Op.UNSHARD: "gathering the parameters",
    Op.RESHARD: "freeing the gathered parameters",
}


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    Args:
        op: what to do. ARM tells the strategy that the next backward of `stage` is its last of this update,
            REDUCE that the stage's gradients are complete and may be summed over data-parallel ranks. UNSHARD gathers
            the stage's parameters from the ranks that share them, RESHARD keeps this rank's shards only.
        stage: number of the stage in the whole model, counted from 0; the stage that acts.
        microbatch: global number of the micro-batch; -1 for ARM, REDUCE, UNSHARD and RESHARD, which concern the whole
            stage.
        peer: of a communication, the stage at its other end; else -1.

    >>> str(Action(Op.FORWARD, 0, 3)), str(Action(Op.REDUCE, 1)), str(Action(Op.SEND_OUTPUT, 0, 3, 1))
    ('0F3', '1R', '0SO3:1')
    """

    op: Op
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        microbatch = str(self.microbatch) if self.microbatch >= 0 else ""
        peer = f":{self.peer}" if self.peer >= 0 else ""
        return f"{self.stage}{self.op.value}{microbatch}{peer}"


Plan = tuple[Action, ...]


def described(action: Action) -> str:
    """An action in words.

    >>> described(Action(Op.FORWARD, 1, 3))
    'action 1F3 (forward, stage 1, micro-batch 3)'
    """
    microbatch = f", micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"action {action} ({WORDS[action.op]}, stage {action.stage}{microbatch})"
