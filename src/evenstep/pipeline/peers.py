"""The other ranks of a pipeline: what a runner owes them around a plan, and when it fails.

Before a plan there is room for the first messages; after it all ranks agree that it came to its end, copies of tied
parameters get one gradient, and what was sent has left. A rank that runs out of memory walks the rest of its plan
without computing, so that no message is left on its way and nobody waits; all others learn of it and begin anew. A rank
that fails otherwise says why, and closes its connections.
"""

import traceback
from collections.abc import Mapping
from typing import final

from evenstep.errors import OutOfMemoryError
from evenstep.memory import give_back, is_out_of_memory
from evenstep.names import named_parameters
from evenstep.parallel.reducer.reducer import Spoiled
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.deferred import Deferral
from evenstep.pipeline.edges import Edges
from evenstep.pipeline.runner import Peers
from evenstep.pipeline.stage import Stage, Step
from evenstep.pipeline.staged import Staged
from evenstep.pipeline.ties import sum_over_owners
from evenstep.pipeline.wire import Address

ACTION_NAMES = {
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
class PipelinePeers(Peers):
    """The other ranks of this rank's pipeline.

    Args:
        model: in stages.
        edges: of this rank's stages.
        deferral: of this rank's weight gradients.
    """

    def __init__(self, model: Staged, edges: Edges, deferral: Deferral) -> None:
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

    def fault_of(self, error: BaseException, plan: Plan, walked: int) -> str | None:
        self._deferral.end()
        if isinstance(error, Spoiled):
            return ""
        if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error):
            return None
        if plan[walked].op is Op.UNSHARD:
            return None  # the others wait for this rank's part
        return "".join(traceback.format_exception(error))

    def tell(self, error: BaseException, plan: Plan, walked: int) -> None:
        self._tell(error, f"at {described(plan[walked])}")

    def finish(self, plan: Plan, walked: int, fault: str | None, stages: Mapping[int, Stage], step: Step) -> None:
        trains = any(action.op is Op.REDUCE for action in plan)
        try:
            if fault is not None:
                self._edges.forget()
                walked += not fault and plan[walked].op is Op.REDUCE  # all have taken part in what said so
                if fault:
                    give_back()
                while walked < len(plan):
                    skip(stages[plan[walked].stage], plan[walked], self._edges, step)
                    walked += 1
            # what was reduced before a failure is told to other replicas only here
            concerned = self._mesh.world if trains else self._mesh.pipeline
            spoiled = concerned.sum_floats([float(fault is not None)])[0] > 0
            if trains and not spoiled:
                sum_over_owners(self._ties, self._parameters, self._mesh.pipeline)
            self._edges.wire.flush()
        except BaseException as error:
            self._tell(error, f"at {described(plan[min(walked, len(plan) - 1)])}" if plan else "after its plan")
            raise
        if spoiled:
            raise Spoiled(fault or "")

    def _tell(self, error: BaseException, place: str) -> None:
        mesh = self._mesh
        where = f"pipeline rank {mesh.pipeline.rank} of {mesh.pipeline.ranks} stopped {place}"
        error.add_note(f"({where})")
        for group in (mesh.pipeline, mesh.data, mesh.world):
            group.abort(f"{where}: {type(error).__name__}: {error}")


def skip(stage: Stage, action: Action, edges: Edges, step: Step) -> None:
    """Take part in an action without computing, so that nothing is left on its way and nobody waits.

    What is received is dropped. What is sent holds nothing, by which those who receive it learn that they must do the
    same.
    """
    op, microbatch = action.op, action.microbatch
    if op in (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT):
        edges.receive(action)
    elif op is Op.FORWARD:
        for source in stage.sources:
            edges.drop(Address("output", source, stage.index, microbatch))
    elif op in (Op.BACKWARD, Op.INPUT_BACKWARD):
        for destination in stage.carried:
            edges.drop(Address("gradient", destination, stage.index, microbatch))
    elif op in (Op.SEND_OUTPUT, Op.SEND_GRADIENT):
        edges.send_nothing(action)
    elif op is Op.REDUCE:
        error = OutOfMemoryError(f"memory ran out at {described(action)}, which can't be undone.")
        stage.reducer.spoil(step.num_microbatches, error)
    elif op is Op.RESHARD:
        stage.act(action, step)


def described(action: Action) -> str:
    """An action in words.

    >>> described(Action(Op.FORWARD, 1, 3))
    'action 1F3 (forward, stage 1, micro-batch 3)'
    """
    microbatch = f", micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"action {action} ({ACTION_NAMES[action.op]}, stage {action.stage}{microbatch})"
