"""Execution of any plan: each action goes to its stage, and an error ends the waits of other ranks."""

from collections.abc import Sequence
from typing import final

import torch
from torch.profiler import record_function

from evenstep.errors import clause
from evenstep.internals import profiler_runs
from evenstep.oom import is_out_of_memory
from evenstep.parallel.group import Mesh
from evenstep.parallel.strategies import Reducers
from evenstep.pipeline.action import Action, Op, Plan, described
from evenstep.pipeline.deferred import Deferral, prepare
from evenstep.pipeline.pipeline_model import PipelineModel
from evenstep.pipeline.stage import PlanStep, Stage
from evenstep.pipeline.ties import sum_over_owners
from evenstep.pipeline.wire import Edges
from evenstep.tensors import named_parameters


@final
class Runner:
    """Executes plans over the stages that this rank holds; a whole model has neither `model` nor `edges`."""

    def __init__(self, stages: Sequence[Stage], model: PipelineModel | None = None, edges: Edges | None = None) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.edges = edges
        self._model = model

    def run(self, plan: Plan, step: PlanStep) -> None:
        """Execute `plan`. Gradients are complete, reduced and summed over ties when it returns.

        Raises:
            Exception: what an action raised. In a pipeline it has a note that names rank, action and micro-batch.
        """
        model, edges = self._model, self.edges
        stages, acted, profiled = self.stages, step.acted, profiler_runs()
        action: Action | None = None
        try:
            if edges is not None:
                edges.begin(plan)
            for action in plan:
                op = action.op
                act = stages[action.stage].acts[op]
                if profiled:
                    with record_function(f"{action} {op.name.lower()}"):
                        act(action, step)
                else:
                    act(action, step)
                acted(op)
            if edges is not None and model is not None:
                if model.ties and any(action.op is Op.REDUCE for action in plan):
                    sum_over_owners(model.ties, named_parameters(model), model.mesh.pipeline)
                edges.wire.flush()
        except BaseException as error:
            self._forget()
            if model is not None:
                self._stop(error, model.mesh, action)
            raise

    def reset(self) -> None:
        """Forget an attempt that has failed, and what ends of messages know of each other; all ranks do."""
        self._forget()
        if self.edges is not None:
            self.edges.wire.reset()

    def _forget(self) -> None:
        for stage in self.stages.values():
            stage.forget()
        if self.edges is not None:
            self.edges.forget()

    def _stop(self, error: BaseException, mesh: Mesh, action: Action | None) -> None:
        place = "before its first action" if action is None else f"at {described(action)}"
        where = f"pipeline rank {mesh.pipeline.rank} of {mesh.pipeline.ranks} stopped {place}"
        error.add_note(f"({where})")
        if not is_out_of_memory(error) and not mesh.world.interrupted():
            mesh.world.fail(f"{where}: {clause(error)}")


def build_runner(model: PipelineModel, reducers: Reducers, device: torch.device) -> Runner:
    """The runner of this rank's stages."""
    deferral = Deferral()
    edges = Edges(model.layout, model.mesh.pipeline, device)
    if model.schedule.splits_backward:
        for module in model.stage_modules.values():
            prepare(module, deferral)
    stages: list[Stage] = []
    for index, module in model.stage_modules.items():
        stages.append(Stage(module, reducers.wrap(module), model=model, index=index, edges=edges, deferral=deferral))
    return Runner(stages, model, edges)
