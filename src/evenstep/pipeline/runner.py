"""Execution of any plan: each action goes to its stage; `Peers` prepares and ends the plan between ranks."""

from collections.abc import Sequence
from typing import final

import torch
from torch.profiler import record_function

from evenstep.errors import clause
from evenstep.internals import profiler_runs
from evenstep.oom import is_out_of_memory
from evenstep.parallel.reducers import Reducers
from evenstep.pipeline.action import Op, Plan, described
from evenstep.pipeline.deferred import Deferral, prepare
from evenstep.pipeline.pipeline_model import PipelineModel
from evenstep.pipeline.stage import PlanStep, Stage
from evenstep.pipeline.ties import sum_over_owners
from evenstep.pipeline.wire import Edges
from evenstep.tensors import named_parameters


@final
class Runner:
    """Executes plans over the stages that this rank holds.

    Args:
        peers: the other ranks of the pipeline; none by default.
    """

    def __init__(self, stages: Sequence[Stage], peers: "Peers | None" = None) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.peers = peers

    def run(self, plan: Plan, step: PlanStep) -> None:
        """Execute `plan`. Gradients are complete, reduced and summed over ties when it returns.

        Raises:
            Exception: what an action raised. In a pipeline it has a note that names rank, action and micro-batch.
        """
        if self.peers is not None:
            self.peers.begin(plan)
        walked, stages, acted, profiled = 0, self.stages, step.acted, profiler_runs()
        try:
            for walked, action in enumerate(plan):  # noqa: B007 - told when an action has raised
                op = action.op
                act = stages[action.stage].acts[op]
                if profiled:
                    with record_function(f"{action} {op.name.lower()}"):
                        act(action, step)
                else:
                    act(action, step)
                acted(op)
        except BaseException as error:
            for stage in self.stages.values():
                stage.forget()
            if self.peers is not None:
                self.peers.stopped(error, plan, walked)
            raise
        if self.peers is not None:
            self.peers.finish(plan)


@final
class Peers:
    """The other ranks of this rank's pipeline; `wire` carries messages to them."""

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
        """Action `walked` raised: discard messages on their way, and name the action in the error."""
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
        """Forget all messages, and what their ends know of each other; all ranks do."""
        self._deferral.end()
        self._edges.forget()
        self._edges.wire.reset()

    def _tell(self, error: BaseException, place: str) -> None:
        mesh = self._mesh
        where = f"pipeline rank {mesh.pipeline.rank} of {mesh.pipeline.ranks} stopped {place}"
        error.add_note(f"({where})")
        if not is_out_of_memory(error) and not mesh.world.interrupted():
            mesh.world.fail(f"{where}: {clause(error)}", wake=True)


def build_runner(
    model: PipelineModel, reducers: Reducers, device: torch.device, *, deferral: Deferral | None = None
) -> Runner:
    """The runner of this rank's stages; layers with a custom backward may share `deferral`."""
    layout, deferral = model.layout, deferral or Deferral()
    edges = Edges(layout, model.mesh.pipeline, device)
    for module in model.stage_modules.values():
        if model.schedule.splits_backward:
            prepare(module, deferral)
    wrapped = {index: reducers.wrap(module) for index, module in model.stage_modules.items()}
    stages = [
        Stage(
            module,
            reducer,
            index=index,
            edges=edges,
            sources=layout.sources(index),
            carried={destination: model.carried[index, destination] for destination in layout.destinations(index)},
            gives_loss=index == model.last,
            is_first_here=index == model.own[0],
            is_last_here=index == model.own[-1],
            deferral=deferral,
        )
        for index, (module, reducer) in wrapped.items()
    ]
    return Runner(stages, Peers(model, edges, deferral))
