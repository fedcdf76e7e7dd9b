"""Executes any plan.

Hands each action of a plan to its stage; `peers` prepares and ends the plan between ranks.
"""

from collections.abc import Sequence
from typing import final

from torch.profiler import record_function

from evenstep.errors import PlanError
from evenstep.internals import profiler_runs
from evenstep.pipeline.action import Op, Plan
from evenstep.pipeline.stage import PlanStep, Stage
from evenstep.pipeline.wire import Wire


class Peers:
    """The other ranks of a pipeline; here there are none.

    Attributes:
        wire: over which messages to them go.
    """

    wire: Wire | None = None

    def begin(self, plan: Plan) -> None:
        """A plan begins, on all ranks."""

    def stopped(self, error: BaseException, plan: Plan, walked: int) -> None:
        """Action `walked` has raised: let go of what is on its way, and note in the error where it was."""

    def finish(self, plan: Plan) -> None:
        """The plan was walked to its end."""

    def reset(self) -> None:
        """Forget all messages, and what their ends know of each other; all ranks do."""


@final
class Runner:
    """Executes plans over the stages that this rank holds.

    Args:
        peers: the other ranks of the pipeline; none by default.
    """

    def __init__(self, stages: Sequence[Stage], peers: Peers | None = None) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.peers = peers or Peers()

    def run(self, plan: Plan, step: PlanStep) -> None:
        """Execute `plan`. Gradients are complete, reduced and summed over ties when it returns.

        Raises:
            PlanError: an action that no stage can do.
            Exception: what an action raised. In a pipeline it has a note that names rank, action and micro-batch.
        """
        self.peers.begin(plan)
        walked, stages, acted, profiled = 0, self.stages, step.acted, profiler_runs()
        try:
            for walked, action in enumerate(plan):  # noqa: B007 - told when an action has raised
                op = action.op
                act = stages[action.stage].acts.get(op)
                if act is None:
                    can = ", ".join(op.name for op in Op)
                    raise PlanError(f"a stage can do {can}, but the plan says {action}.")
                if profiled:
                    with record_function(f"{action} {op.name.lower()}"):
                        act(action, step)
                else:
                    act(action, step)
                acted(op)
        except BaseException as error:
            for stage in self.stages.values():
                stage.forget()
            self.peers.stopped(error, plan, walked)
            raise
        self.peers.finish(plan)
