"""Executes any plan.

The runner hands each action of a plan to its stage, and does nothing else: which schedule it is, whether it trains or
evaluates, how gradients are shared and what a micro-batch is, it does not know. What other ranks of a pipeline need
before and after a plan, and when it fails, is its peers' to say; a model that is whole has none.
"""

from collections.abc import Mapping, Sequence
from typing import final

from evenstep.parallel.reducer.reducer import ExplainsErrors
from evenstep.pipeline.action import Plan
from evenstep.pipeline.stage import Stage, Step
from evenstep.pipeline.wire import Wire


class Peers:
    """The other ranks of a pipeline; here there are none.

    Attributes:
        wire: over which messages to them go.
    """

    wire: Wire | None = None

    def begin(self, plan: Plan) -> None:
        """A plan begins, on all ranks."""

    def fault_of(self, error: BaseException, plan: Plan, walked: int) -> str | None:
        """After action `walked` has raised: why the ranks must do it all again together; None where they can't.

        It is a traceback, or "" where another rank has failed.
        """
        return None

    def tell(self, error: BaseException, plan: Plan, walked: int) -> None:
        """Tell the others that this rank has stopped, so that none waits for it."""

    def finish(self, plan: Plan, walked: int, fault: str | None, stages: Mapping[int, Stage], step: Step) -> None:
        """The plan was walked so far.

        Raises:
            Spoiled: on all ranks, when one of them ran out of memory; nothing that was computed may be used.
        """


@final
class Runner:
    """Executes plans over the stages that this rank holds.

    Args:
        stages: this rank's.
        peers: the other ranks of the pipeline; none by default.
    """

    def __init__(self, stages: Sequence[Stage], peers: Peers | None = None) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.peers = peers or Peers()

    def run(self, plan: Plan, step: Step) -> None:
        """Execute `plan`. Gradients are complete, reduced and summed over ties when it returns.

        Args:
            plan: this rank's actions.
            step: the micro-batches that go through it.

        Raises:
            PlanError: an action that no stage can do.
            Spoiled: on all ranks of a pipeline, when one of them ran out of memory.
            Exception: what an action raised. In a pipeline it has a note that names rank, action and micro-batch; the
                other ranks raise an EvenstepError that says so.
        """
        self.peers.begin(plan)
        walked, fault = 0, None
        try:
            for action in plan:
                self.stages[action.stage].act(action, step)
                walked += 1
        except BaseException as error:
            for stage in self.stages.values():
                stage.forget()
            fault = self.peers.fault_of(error, plan, walked)
            if fault is None:
                self.peers.tell(error, plan, walked)
                explained = self._explained(error, plan[walked].stage)
                if explained is error:
                    raise
                raise explained from error
        self.peers.finish(plan, walked, fault, self.stages, step)

    def _explained(self, error: BaseException, stage: int) -> BaseException:
        """What an error of torch's means with the stage's reducer."""
        reducer = self.stages[stage].reducer
        if isinstance(error, RuntimeError) and isinstance(reducer, ExplainsErrors):
            return reducer.explained(error)
        return error
