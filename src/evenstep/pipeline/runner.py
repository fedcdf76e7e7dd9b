"""Execution of any plan: each action goes to its stage, and an error ends the waits of other ranks."""

from collections.abc import Sequence
from typing import final

import torch
from torch.profiler import record_function

from evenstep.errors import clause
from evenstep.internals import profiler_runs
from evenstep.oom import is_out_of_memory
from evenstep.parallel.strategies import Reducers
from evenstep.pipeline.action import Action, Op, Plan, described
from evenstep.pipeline.deferred import Deferral, prepare
from evenstep.pipeline.pipeline_model import PipelineModel
from evenstep.pipeline.stage import PlanStep, Stage
from evenstep.pipeline.ties import sum_over_owners
from evenstep.pipeline.wire import Edges, Wire
from evenstep.tensors import named_parameters


@final
class Pipeline:
    """Messages and deferred gradients of all stages of one rank."""

    def __init__(self, model: PipelineModel, device: torch.device, deferral: Deferral) -> None:
        self.edges = Edges(model.layout, model.mesh.pipeline, device)
        self.deferral = deferral
        self._model = model

    @property
    def wire(self) -> Wire:
        return self.edges.wire

    def finish(self, plan: Plan) -> None:
        """Sum gradients over ties after an update's last action, and wait until all messages have left."""
        if self._model.ties and any(action.op is Op.REDUCE for action in plan):
            sum_over_owners(self._model.ties, named_parameters(self._model), self._model.mesh.pipeline)
        self.wire.flush()

    def stop(self, error: BaseException, place: str) -> None:
        """Discard messages, name the place in the error, and end the waits of other ranks."""
        self.deferral.end()
        self.edges.forget()
        mesh = self._model.mesh
        where = f"pipeline rank {mesh.pipeline.rank} of {mesh.pipeline.ranks} stopped {place}"
        error.add_note(f"({where})")
        if not is_out_of_memory(error) and not mesh.world.interrupted():
            mesh.world.fail(f"{where}: {clause(error)}", wake=True)


@final
class Runner:
    """Executes plans over the stages that this rank holds; `pipeline` is None for a whole model."""

    def __init__(self, stages: Sequence[Stage], pipeline: Pipeline | None = None) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.pipeline = pipeline

    def run(self, plan: Plan, step: PlanStep) -> None:
        """Execute `plan`. Gradients are complete, reduced and summed over ties when it returns.

        Raises:
            Exception: what an action raised. In a pipeline it has a note that names rank, action and micro-batch.
        """
        pipeline, stages, acted, profiled = self.pipeline, self.stages, step.acted, profiler_runs()
        action: Action | None = None
        try:
            if pipeline is not None:
                pipeline.edges.begin(plan)
            for action in plan:
                op = action.op
                act = stages[action.stage].acts[op]
                if profiled:
                    with record_function(f"{action} {op.name.lower()}"):
                        act(action, step)
                else:
                    act(action, step)
                acted(op)
            if pipeline is not None:
                pipeline.finish(plan)
        except BaseException as error:
            for stage in stages.values():
                stage.forget()
            if pipeline is not None:
                pipeline.stop(error, "before its first action" if action is None else f"at {described(action)}")
            raise

    def reset(self) -> None:
        """Forget an attempt that has failed, and what ends of messages know of each other; all ranks do."""
        for stage in self.stages.values():
            stage.forget()
        if self.pipeline is not None:
            self.pipeline.deferral.end()
            self.pipeline.edges.forget()
            self.pipeline.wire.reset()


def build_runner(
    model: PipelineModel, reducers: Reducers, device: torch.device, *, deferral: Deferral | None = None
) -> Runner:
    """The runner of this rank's stages; layers with a custom backward may share `deferral`."""
    pipeline = Pipeline(model, device, deferral or Deferral())
    if model.schedule.splits_backward:
        for module in model.stage_modules.values():
            prepare(module, pipeline.deferral)
    stages: list[Stage] = []
    for index, module in model.stage_modules.items():
        wrapped, reducer = reducers.wrap(module)
        stages.append(
            Stage(wrapped, reducer, model=model, index=index, edges=pipeline.edges, deferral=pipeline.deferral)
        )
    return Runner(stages, pipeline)
