"""The other ranks of a pipeline, around a plan and on failure.

Makes room for messages before a plan, sums tied gradients after it, and closes connections on failure.
"""

from typing import final

from evenstep.errors import clause
from evenstep.memory import is_out_of_memory
from evenstep.names import named_parameters
from evenstep.pipeline.action import WORDS, Action, Op, Plan
from evenstep.pipeline.deferred import Deferral
from evenstep.pipeline.edges import Edges
from evenstep.pipeline.pipeline_model import PipelineModel
from evenstep.pipeline.runner import Peers
from evenstep.pipeline.ties import sum_over_owners


@final
class PipelinePeers(Peers):
    """The other ranks of this rank's pipeline."""

    def __init__(self, model: PipelineModel, edges: Edges, deferral: Deferral) -> None:
        self.wire = edges.wire
        self._edges, self._deferral = edges, deferral
        self._mesh, self._ties = model.mesh, model.ties
        self._parameters = named_parameters(model)

    def begin(self, plan: Plan) -> None:
        try:
            self._edges.begin(plan)
        except BaseException as error:
            self._tell(error, "before its first action")
            raise

    def stopped(self, error: BaseException, plan: Plan, walked: int) -> None:
        self._deferral.end()
        self._edges.forget()
        self._tell(error, f"at {described(plan[walked])}")

    def finish(self, plan: Plan) -> None:
        try:
            if any(action.op is Op.REDUCE for action in plan):
                sum_over_owners(self._ties, self._parameters, self._mesh.pipeline)
            self._edges.wire.flush()
        except BaseException as error:
            self._tell(error, f"at {described(plan[-1])}" if plan else "after its plan")
            raise

    def reset(self) -> None:
        self._deferral.end()
        self._edges.forget()
        self._edges.wire.reset()

    def _tell(self, error: BaseException, place: str) -> None:
        mesh = self._mesh
        where = f"pipeline rank {mesh.pipeline.rank} of {mesh.pipeline.ranks} stopped {place}"
        error.add_note(f"({where})")
        if not is_out_of_memory(error) and not mesh.world.interrupted():
            mesh.world.abort(f"{where}: {clause(error)}")


def described(action: Action) -> str:
    """An action in words.

    >>> described(Action(Op.FORWARD, 1, 3))
    'action 1F3 (forward, stage 1, micro-batch 3)'
    """
    microbatch = f", micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"action {action} ({WORDS[action.op]}, stage {action.stage}{microbatch})"
