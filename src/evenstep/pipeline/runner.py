"""Executes any plan.

The runner walks the actions of a plan and does nothing else: what enters the first stage and what is done with the
last one's output it asks of the passage, how gradients are shared it leaves to the strategy. It holds no mode
branches: other pipeline schedules are other plans.
"""

from collections.abc import Sequence
from typing import Any, Protocol, final

from torch import Tensor

from evenstep.parallel.reducers import Reducers
from evenstep.pipeline.action import Op, Plan
from evenstep.pipeline.stage import Stage

FORWARD, BACKWARD, ARM = Op.FORWARD, Op.BACKWARD, Op.ARM  # Python looks members of an enum up slowly


class Passage(Protocol):
    """What the micro-batches of one update bring along, asked for by the runner."""

    def forward(self, stage: Stage, microbatch: int) -> Any:
        """Apply `stage` to the micro-batch; from the last stage: its loss, ready for backward."""
        ...

    def backward(self, loss: Tensor, microbatch: int) -> None:
        """Add the micro-batch's gradients to those of the stage's parameters."""
        ...


@final
class Runner:
    """Executes plans over the stages that this rank owns.

    Args:
        stages: this rank's stages.
        strategy: how gradients are shared between data-parallel ranks.
    """

    def __init__(self, stages: Sequence[Stage], strategy: Reducers) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._strategy = strategy

    def run(self, plan: Plan, passage: Passage, num_microbatches: int) -> None:
        """Execute `plan`. Gradients are complete and reduced when it returns.

        Args:
            plan: this rank's actions.
            passage: of this rank's micro-batches.
            num_microbatches: of the update, over all ranks.

        The losses that wait for their backward live in `live` only, so that a graph is freed with its backward, and
        all of them when an action raises.
        """
        live: dict[tuple[int, int], Any] = {}
        for action in plan:
            stage, microbatch = action.stage, action.microbatch
            op = action.op
            if op is FORWARD:
                live[stage, microbatch] = passage.forward(self._stages[stage], microbatch)
            elif op is BACKWARD:
                passage.backward(live.pop((stage, microbatch)), microbatch)
                self._strategy.collect(self._stages[stage].module, microbatch)
            elif op is ARM:
                self._strategy.arm(self._stages[stage].module)
            else:
                self._strategy.reduce(self._stages[stage].module, num_microbatches)
