"""Stages, plans and norms of updates and evaluations, chosen when a trainer is built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data import Microbatch
from evenstep.optim.apply import norms
from evenstep.parallel import Group, Reducer, Reducers, Strategy, each_norm, squared_norm
from evenstep.pipeline import SCHEDULES, Layout, Op, PipelineModel, Plan, executed, forwards
from evenstep.pipeline.runner import Runner, build_runner
from evenstep.pipeline.stage import Stage
from evenstep.tensors import named_parameters, parameters_in
from evenstep.train.update.microbatch import MicrobatchStep, dummy_step
from evenstep.train.update.rollback import Buffers

Numbers = tuple[int, ...]  # of micro-batches in a plan, or of their pieces


@final
class Norms:
    """Norms of what is trained, over all shards and stages; all ranks call each method together.

    Args:
        trained: parameters of the optimizer by name.
        stages: of a model in stages, where each parameter's norm has its place in one vector, which all ranks get.
    """

    def __init__(
        self,
        reducers: Reducers,
        trained: Mapping[str, nn.Parameter],
        device: torch.device,
        stages: PipelineModel | None = None,
    ) -> None:
        self._layout = reducers.layout
        self._pipeline = Group() if stages is None else stages.mesh.pipeline
        formats = {one.dtype for one in trained.values()}
        dtypes = {dtype for theirs in self._pipeline.gather(formats) for dtype in theirs}
        self._dtype = _norm_dtype(dtypes)
        self._slots = {} if stages is None else {name: slot for slot, name in enumerate(stages.sizes)}
        self._counted = {self._slots[name]: one for name, one in trained.items() if name in self._slots}
        self._zero = torch.zeros((), dtype=self._dtype or next(iter(dtypes)), device=device)

    def squared(self, gradients: list[Tensor]) -> Tensor | None:
        """‖g‖₂² of all that is trained, alike on all ranks; None where none has a gradient: no task gave a loss."""
        if not self._slots:
            of_each = partial(norms, dtype=self._dtype)
            return squared_norm(self._layout, gradients, of_each) if gradients else None
        each = self._each({slot: one.grad for slot, one in self._counted.items() if one.grad is not None}, self._dtype)
        if not each:
            return None
        summed = torch.stack([*each.values()])  # parameters without a gradient on any rank are no summands
        return summed.dot(summed)

    def each(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """‖v‖₂ of whole tensors, sharded as the parameters of these names; equal on all ranks."""
        dense = {name: one.coalesce().values() if one.is_sparse else one for name, one in values.items()}
        if not self._slots:
            wide = _norm_dtype({one.dtype for one in dense.values()})  # parameters of 16 bits have wider gradients
            each = each_norm(self._layout, [*dense.values()], partial(norms, dtype=wide))
            return dict(zip(values, each.unbind(), strict=True))
        names = list(self._slots)
        known = {self._slots[name]: one for name, one in dense.items() if name in self._slots}
        return {names[slot]: norm for slot, norm in self._each(known, self._zero.dtype).items()}

    def _each(self, present: dict[int, Tensor], dtype: torch.dtype | None) -> dict[int, Tensor]:
        """Norms by slot of what is present on some rank of the pipeline."""
        slots = range(len(self._slots))
        counts = self._pipeline.sum_floats([float(slot in present) for slot in slots])
        mine: dict[int, Tensor] = {}
        if present:
            found = each_norm(self._layout, [*present.values()], partial(norms, dtype=dtype))
            mine = dict(zip(present, found.unbind(), strict=True))
        each = torch.stack([mine.get(slot, self._zero) for slot in slots])
        self._pipeline.sum(each)()
        return {slot: norm for slot, (norm, count) in enumerate(zip(each.unbind(), counts, strict=True)) if count}


def _norm_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}:
        return None
    return torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32


@final
@dataclass(slots=True, kw_only=True)
class Execution:
    """Stages, plans and norms of updates and evaluations.

    Args:
        world: all ranks of the run.
        group: the ranks that train one model together.
        pipeline: those of them that hold its other stages.
        reducers: how gradients are shared between data-parallel ranks, one for each stage.
        local_runner: runs plans whose gradients are shared with nobody.
        plan: the plan of an update's micro-batches; without reductions where others follow before the step.
        forwards: the plan of an evaluation's micro-batches.
        buffers: of the model on this rank.

    Attributes:
        running: the micro-batches that run now, or ran last.
    """

    world: Group
    group: Group
    pipeline: Group
    reducers: Reducers
    runner: Runner
    local_runner: Runner
    plan: Callable[[Numbers, bool], Plan]
    forwards: Callable[[Numbers], Plan]
    norms: Norms
    buffers: Buffers
    in_stages: bool
    running: MicrobatchStep | None = None

    @property
    def num_parts(self) -> int:
        """Number of parts of the model on different ranks."""
        return self.pipeline.ranks * self.reducers.layout.num_shards

    @property
    def evaluates_together(self) -> bool:
        """True if ranks wait for each other in the forwards of evaluations."""
        return self.in_stages or bool(self.reducers.per_pass)

    def begin(self, step: MicrobatchStep, *, kind: str, backward: bool = False, last: bool = True) -> None:
        """Before a plan: run dummy passes where all ranks must run the same number.

        Args:
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: False if others follow before the optimizer's step.
        """

        def run_dummy(piece: Microbatch) -> None:
            with self.buffers.unchanged(), dummy_step(step.context, piece) as dummy:
                self.running = dummy
                self.run_locally(dummy, backward=backward)

        for reducer in self.reducers.per_pass if step.model is None else ():
            reducer.pad_passes([*step.pieces.values()], run_dummy, backward=backward, kind=kind, last=last)
        self.running = step

    def run_locally(self, step: MicrobatchStep, *, backward: bool = True) -> None:
        """Run micro-batches on this rank, whose gradients are shared with nobody."""
        self.local_runner.run(self.plan(step.numbers, True) if backward else self.forwards(step.numbers), step)

    def reset(self) -> None:
        """Forget everything of an attempt that has failed, on all ranks."""
        self.runner.reset()
        self.local_runner.reset()
        self.reducers.abandon()


def build_execution(model: nn.Module, strategy: Strategy, optimizer: Optimizer, device: torch.device) -> Execution:
    """The execution of a whole model, which is one stage, or of one in stages."""
    stages = model if isinstance(model, PipelineModel) else None
    reducers = Reducers(strategy, per_plan=stages is not None)
    held = {id(parameter) for parameter in parameters_in(optimizer)}
    names = [name for name, parameter in named_parameters(model).items() if id(parameter) in held]
    if stages is None:
        runner = Runner([Stage(model, reducers.wrap(model))])
        local_runner = Runner([Stage(model, Reducer(model, Group()))])
        world, group, pipeline, own = strategy.data_group, strategy.group, Group(), (0,)
        schedule, layout = SCHEDULES["sequential"], Layout.chain(ranks=1)
    else:
        runner = local_runner = build_runner(stages, reducers, device)
        world = group = stages.mesh.world
        pipeline, own = stages.mesh.pipeline, stages.own
        schedule, layout = stages.schedule, stages.layout
    reducers.shard_optimizer(optimizer)
    trained = {name: parameter for name, parameter in named_parameters(model).items() if name in {*names}}
    overlaps, gathers = not schedule.splits_backward, reducers.gather_per_plan

    @lru_cache(maxsize=1024)
    def plan(numbers: Numbers, reduced: bool) -> Plan:
        mine = schedule.plans(layout, numbers)[pipeline.rank]
        if not reduced:
            return tuple(action for action in mine if action.op in (Op.FORWARD, Op.BACKWARD))
        return executed(mine, own, overlaps=overlaps, gathers=gathers)

    @lru_cache(maxsize=1024)
    def plan_of_forwards(numbers: Numbers) -> Plan:
        return executed(forwards(layout, numbers)[pipeline.rank], own, gathers=gathers)

    return Execution(
        world=world,
        group=group,
        pipeline=pipeline,
        reducers=reducers,
        runner=runner,
        local_runner=local_runner,
        plan=plan,
        forwards=plan_of_forwards,
        norms=Norms(reducers, trained, device, stages),
        buffers=Buffers(model),
        in_stages=stages is not None,
    )
