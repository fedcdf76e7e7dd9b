"""Stages, plans and norms of updates and evaluations, chosen when a trainer is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data import Microbatch
from evenstep.optim.apply import norms
from evenstep.parallel import Group, ParameterLayout, Reducer, Reducers, Strategy, each_norm, squared_norm
from evenstep.pipeline import SCHEDULES, Layout, Op, PipelineModel, Plan, executed, forwards
from evenstep.pipeline.runner import Runner, build_runner
from evenstep.pipeline.stage import Stage
from evenstep.tensors import named_parameters, parameters_in
from evenstep.train.update.context import TrainContext
from evenstep.train.update.microbatch import MicrobatchStep, dummy_step
from evenstep.train.update.rollback import Buffers

T = TypeVar("T")
Numbers = tuple[int, ...]  # of micro-batches in a plan, or of their pieces


@final
class NormsOfWhole:
    """Norms of a model that each data-parallel rank holds whole, or in shards."""

    def __init__(self, layout: ParameterLayout, parameters: Sequence[Tensor]) -> None:
        self._layout = layout
        self._norms = partial(norms, dtype=_norm_dtype({parameter.dtype for parameter in parameters}))

    def squared(self, gradients: list[Tensor]) -> Tensor | None:
        """‖g‖₂² of all that is trained, alike on all ranks; None where none has a gradient: no task gave a loss."""
        return squared_norm(self._layout, gradients, self._norms) if gradients else None

    def each(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """‖v‖₂ of whole tensors, sharded as the parameters of these names; equal on all ranks."""
        dense = [_dense(value) for value in values.values()]
        wide = _norm_dtype({value.dtype for value in dense})  # parameters of 16 bits are no gradients of their masters
        each = each_norm(self._layout, dense, partial(norms, dtype=wide))
        return dict(zip(values, each.unbind(), strict=True))


@final
class NormsOfStages:
    """Norms of a model in stages: each parameter's has its place in one vector, which all ranks get."""

    def __init__(self, model: PipelineModel, layout: ParameterLayout, names: set[str], device: torch.device) -> None:
        self._layout = layout
        self._pipeline = model.mesh.pipeline
        self._slots = slots = {name: slot for slot, name in enumerate(model.parameter_sizes())}
        self._counted = [(slots[n], p) for n, p in named_parameters(model).items() if n in slots and n in names]
        dtypes = {dtype for theirs in self._pipeline.gather({p.dtype for _, p in self._counted}) for dtype in theirs}
        self._dtype = _norm_dtype(dtypes)
        self._zeros = torch.zeros(len(slots), dtype=self._dtype or next(iter(dtypes), torch.float32), device=device)
        self._known_places: dict[tuple[int, ...], Tensor] = {}  # few: which have a gradient changes seldom

    def squared(self, gradients: list[Tensor]) -> Tensor | None:
        """See `NormsOfWhole.squared`: parameters without a gradient on any rank are left out of the sum."""
        present = [(slot, p.grad) for slot, p in self._counted if p.grad is not None]
        anywhere, each = self._each(present, self._dtype)
        if len(anywhere) < len(each):
            each = each.index_select(0, self._places(tuple(anywhere)))
        return each.dot(each) if anywhere else None

    def each(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `NormsOfWhole.each`."""
        known = [(self._slots[name], _dense(value)) for name, value in values.items() if name in self._slots]
        anywhere, each = self._each(known, self._zeros.dtype)  # parameters may be narrower than their gradients
        names = list(self._slots)
        return {names[slot]: each[slot] for slot in anywhere}

    def _each(self, present: list[tuple[int, Tensor]], dtype: torch.dtype | None) -> tuple[list[int], Tensor]:
        each = torch.zeros_like(self._zeros)
        having = {slot for slot, _ in present}
        counts = self._pipeline.sum_floats([float(slot in having) for slot in range(len(each))])
        anywhere = [slot for slot, count in enumerate(counts) if count]
        if present:
            places = self._places(tuple([slot for slot, _ in present]))
            each[places] = each_norm(self._layout, [g for _, g in present], partial(norms, dtype=dtype))
        self._pipeline.sum(each)()
        return anywhere, each

    def _places(self, slots: tuple[int, ...]) -> Tensor:
        if slots not in self._known_places:
            places = torch.tensor(slots, dtype=torch.long)
            self._known_places[slots] = places.to(self._zeros.device, non_blocking=True)
        return self._known_places[slots]


def _dense(value: Tensor) -> Tensor:
    return value.coalesce().values() if value.is_sparse else value


def _norm_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}:
        return None
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Stages, plans and norms of updates and evaluations.

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
    norms: NormsOfWhole | NormsOfStages
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
        watch: Callable[[MicrobatchStep], None] = lambda step: None,
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
            runner.reset()
        self.reducers.abandon()


def build_execution(model: nn.Module, strategy: Strategy, optimizer: Optimizer, device: torch.device) -> Execution:
    """The execution of a whole model, or of one in stages."""
    if isinstance(model, PipelineModel):
        return _of_stages(model, strategy, optimizer, device)
    gradient_norms = NormsOfWhole(strategy.layout, parameters_in(optimizer))
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
        norms=gradient_norms,
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
