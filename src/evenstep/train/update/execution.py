"""Stages, plans and norms of updates and evaluations, chosen when a trainer is built."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.parallel import Dealing, Group, Reducer, Reducers, Strategy
from evenstep.pipeline import (
    SCHEDULES,
    Layout,
    Op,
    PipelineModel,
    Plan,
    Runner,
    Stage,
    build_runner,
    executed,
    forwards,
)
from evenstep.tensors import named_parameters, parameters_in
from evenstep.train.update.gradient_norms import GradientNorms, NormsOfStages, NormsOfWhole
from evenstep.train.update.microbatch import MicrobatchStep

T = TypeVar("T")
Numbers = tuple[int, ...]  # of what goes through a plan


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
        alone: runs plans whose gradients are shared with nobody.
        plan: the plan of an update's micro-batches; without reductions where others follow before the step.
        forwards: the plan of an evaluation's.
        holds_output: whether this rank has the model's outputs for its micro-batches.
    """

    world: Group
    group: Group
    pipeline: Group
    reducers: Reducers
    trainer: Runner
    evaluator: Runner
    alone: Runner
    plan: Callable[[Numbers, bool], Plan]
    forwards: Callable[[Numbers], Plan]
    norms: GradientNorms
    holds_output: bool = True
    in_stages: bool = False

    @property
    def part_held(self) -> tuple[int, int]:
        place, places = self.reducers.layout.shard_index, self.reducers.layout.num_shards
        return self.pipeline.rank * places + place, self.pipeline.ranks * places

    def begin(self, dealing: Dealing | None = None) -> None:
        for reducer in self.reducers.beginning:
            reducer.begin(dealing)

    def pad_passes(
        self,
        work: Sequence[T],
        dummy: Callable[[T], AbstractContextManager[MicrobatchStep]],
        *,
        backward: bool,
        kind: str,
        last: bool = True,
    ) -> None:
        """Before a plan: run passes that count nowhere, where all ranks must run the same number.

        Args:
            dummy: gives a micro-batch that counts nowhere.
            backward: whether they come back.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: whether no others follow before the step.
        """

        def run(microbatch: T) -> None:
            with dummy(microbatch) as step:
                self.try_one(step, backward=backward)

        for reducer in self.reducers.per_pass:
            reducer.pad_passes(work, run, backward=backward, kind=kind, last=last)

    def try_one(self, step: MicrobatchStep, *, backward: bool = True) -> None:
        """Run the micro-batches of `step` on this rank alone."""
        numbers = step.lay_out(step.work)
        self.alone.run(self.plan(numbers, True) if backward else self.forwards(numbers), step)

    @property
    def evaluates_together(self) -> bool:
        return self.in_stages or bool(self.reducers.per_pass)

    def alike(self, values: Sequence[T]) -> Sequence[T]:
        replicas = self.group.ranks // self.pipeline.ranks
        return values[self.group.rank % replicas :: replicas]

    def reset(self) -> None:
        """After a try that has failed, on all ranks: forget everything of it."""
        for runner in (self.trainer, self.evaluator, self.alone):
            for stage in runner.stages.values():
                stage.forget()
            runner.peers.reset()
        self.reducers.abandon()


def build_execution(model: nn.Module, strategy: Strategy, optimizer: Optimizer, device: torch.device) -> Execution:
    """The execution of this kind of model."""
    if isinstance(model, PipelineModel):
        return _of_stages(model, strategy, optimizer, device)
    return _of_whole(model, strategy, optimizer)


def _of_whole(model: nn.Module, strategy: Strategy, optimizer: Optimizer) -> Execution:
    norms = NormsOfWhole(strategy.layout, parameters_in(optimizer))
    reducers = Reducers(strategy)
    wrapped, reducer = reducers.wrap(model)
    reducers.shard_optimizer(optimizer)
    evaluator = Runner([Stage(model, reducer)])

    return Execution(
        world=strategy.data_group,
        group=strategy.group,
        pipeline=Group(),
        reducers=reducers,
        trainer=Runner([Stage(wrapped, reducer)]),
        evaluator=evaluator,
        alone=Runner([Stage(wrapped, Reducer(wrapped, Group()))]),
        plan=_sequential,
        forwards=_forwards,
        norms=norms,
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
    overlaps, gathers = not model.schedule.splits_backward, reducers.gather_per_plan

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
        alone=runner,
        plan=plan,
        forwards=plan_of_forwards,
        norms=NormsOfStages(model, strategy.layout, names, device),
        holds_output=model.last in model.own,
        in_stages=True,
    )
