"""Stages, plans and norms of updates and evaluations, chosen when a trainer is built."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.data import Microbatch
from evenstep.parallel import Group, Reducer, Reducers, Strategy
from evenstep.pipeline import SCHEDULES, Layout, Op, PipelineModel, Plan, executed, forwards
from evenstep.pipeline.runner import Runner, build_runner
from evenstep.pipeline.stage import Stage
from evenstep.tensors import named_parameters, parameters_in
from evenstep.train.buffers import Buffers
from evenstep.train.update.context import TrainContext
from evenstep.train.update.gradient_norms import GradientNorms, NormsOfStages, NormsOfWhole
from evenstep.train.update.microbatch import MicrobatchStep, dummy_step

T = TypeVar("T")
Numbers = tuple[int, ...]  # of micro-batches in a plan, or of their pieces


def _unwatched(step: MicrobatchStep) -> None:
    pass


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution of the micro-batches of updates and evaluations.

    Args:
        world: all ranks of the run.
        group: the ranks that train one model together.
        pipeline: those of them that hold its other stages.
        reducers: how gradients are shared between data-parallel ranks, one for each stage.
        trainer: runs plans with backwards.
        evaluator: runs plans of forwards.
        local_runner: runs plans whose gradients are shared with nobody.
        plan: the plan of an update's micro-batches; without reductions where others follow before the step.
        forwards: the plan of an evaluation's micro-batches.
        buffers: of the model on this rank.
        holds_output: True if this rank has the model's outputs for its micro-batches.
    """

    world: Group
    group: Group
    pipeline: Group
    reducers: Reducers
    trainer: Runner
    evaluator: Runner
    local_runner: Runner
    plan: Callable[[Numbers, bool], Plan]
    forwards: Callable[[Numbers], Plan]
    norms: GradientNorms
    buffers: Buffers
    holds_output: bool = True
    in_stages: bool = False

    @property
    def num_parts(self) -> int:
        """Number of parts of the model on different ranks."""
        return self.pipeline.ranks * self.reducers.layout.num_shards

    @property
    def evaluates_together(self) -> bool:
        """True if ranks wait for each other in the forwards of evaluations."""
        return self.in_stages or bool(self.reducers.per_pass)

    def pad_passes(
        self,
        context: TrainContext,
        work: Sequence[Microbatch],
        *,
        kind: str,
        backward: bool = False,
        last: bool = True,
        watch: Callable[[MicrobatchStep], None] = _unwatched,
    ) -> None:
        """Before a plan: run dummy passes where all ranks must run the same number.

        Args:
            work: this rank's micro-batches, as they go through the model.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: False if others follow before the optimizer's step.
            watch: called with each dummy pass before it runs.
        """

        def run(microbatch: Microbatch) -> None:
            with self.buffers.unchanged(), dummy_step(context, microbatch) as step:
                watch(step)
                self.run_locally(step, backward=backward)

        for reducer in self.reducers.per_pass:
            reducer.pad_passes(work, run, backward=backward, kind=kind, last=last)

    def run_locally(self, step: MicrobatchStep, *, backward: bool = True) -> None:
        """Run the micro-batches of `step` on this rank, whose gradients are shared with nobody."""
        numbers = step.lay_out(step.work)
        self.local_runner.run(self.plan(numbers, True) if backward else self.forwards(numbers), step)

    def of_my_pipeline(self, values: Sequence[T]) -> Sequence[T]:
        """The values of the ranks of this rank's pipeline, of one of each rank of the group."""
        replicas = self.group.ranks // self.pipeline.ranks
        return values[self.group.rank % replicas :: replicas]

    def reset(self) -> None:
        """Forget everything of an attempt that has failed, on all ranks."""
        for runner in (self.trainer, self.evaluator, self.local_runner):
            for stage in runner.stages.values():
                stage.forget()
            if runner.peers is not None:
                runner.peers.reset()
        self.reducers.abandon()


def build_execution(model: nn.Module, strategy: Strategy, optimizer: Optimizer, device: torch.device) -> Execution:
    """The execution of a whole model, or of one in stages."""
    if isinstance(model, PipelineModel):
        return _of_stages(model, strategy, optimizer, device)
    return _of_whole(model, strategy, optimizer)


def _of_whole(model: nn.Module, strategy: Strategy, optimizer: Optimizer) -> Execution:
    norms = NormsOfWhole(strategy.layout, parameters_in(optimizer))
    reducers = Reducers(strategy)
    wrapped, reducer = reducers.wrap(model)
    reducers.shard_optimizer(optimizer)
    return Execution(
        world=strategy.data_group,
        group=strategy.group,
        pipeline=Group(),
        reducers=reducers,
        trainer=Runner([Stage(wrapped, reducer)]),
        evaluator=Runner([Stage(model, reducer)]),
        local_runner=Runner([Stage(wrapped, Reducer(wrapped, Group()))]),
        plan=_sequential,
        forwards=_forwards,
        norms=norms,
        buffers=Buffers(model),
    )


@lru_cache(maxsize=1024)
def _sequential(numbers: Numbers, reduced: bool) -> Plan:
    plan = SCHEDULES["sequential"].plans(Layout.chain(ranks=1), numbers)[0]
    return plan if reduced else tuple(action for action in plan if action.op in (Op.FORWARD, Op.BACKWARD))


@lru_cache(maxsize=1024)
def _forwards(numbers: Numbers) -> Plan:
    return forwards(Layout.chain(ranks=1), numbers)[0]


def _of_stages(model: PipelineModel, strategy: Strategy, optimizer: Optimizer, device: torch.device) -> Execution:
    pipeline = model.mesh.pipeline
    reducers = Reducers(strategy, per_plan=True)
    trained = {id(parameter) for parameter in parameters_in(optimizer)}
    names = {name for name, parameter in named_parameters(model).items() if id(parameter) in trained}
    runner = build_runner(model, reducers, device)
    reducers.shard_optimizer(optimizer)
    overlaps = not model.schedule.splits_backward
    gathers = reducers.gather_per_plan

    @lru_cache(maxsize=256)
    def plan(numbers: Numbers, reduced: bool) -> Plan:
        assert reduced, "all micro-batches of a model in stages are in one plan"
        mine = model.schedule.plans(model.layout, numbers)[pipeline.rank]
        return executed(mine, model.own, overlaps=overlaps, gathers=gathers)

    @lru_cache(maxsize=256)
    def plan_of_forwards(numbers: Numbers) -> Plan:
        return executed(forwards(model.layout, numbers)[pipeline.rank], model.own, gathers=gathers)

    return Execution(
        world=model.mesh.world,
        group=model.mesh.world,
        pipeline=pipeline,
        reducers=reducers,
        trainer=runner,
        evaluator=runner,
        local_runner=runner,
        plan=plan,
        forwards=plan_of_forwards,
        norms=NormsOfStages(model, strategy.layout, names, device),
        buffers=Buffers(model),
        holds_output=model.last in model.own,
        in_stages=True,
    )
