"""Plan and run: leaves the gradients of an update's micro-batches in `.grad`, summed over all ranks."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from evenstep.data import Microbatch
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.rollback import Rollback
from evenstep.train.update.weigh import Weights


@final
class Accumulation:
    """Sums up the gradients of micro-batches."""

    def __init__(
        self,
        *,
        context: TrainContext,
        execution: Execution,
        recovery: Recovery,
        rollback: Rollback,
        trained: TrainedParameters,
    ) -> None:
        self._context, self._execution = context, execution
        self._recovery, self._rollback, self._trained = recovery, rollback, trained
        self._may_be_late = any(task.late_weight for task in context.tasks.values())

    def __call__(self, weights: Weights, update: int) -> MicrobatchResults:
        context, execution = self._context, self._execution
        self._rollback.forget_gradients()
        step = MicrobatchStep.of_update(context, weights, update)
        with step:
            if execution.reducers.per_pass:
                self._run_in_turn(weights, step)
            else:
                self._recovery.runs(step)
                execution.trainer.run(execution.plan(step.lay_out(weights.work), True), step)
        gathered = step.gathered
        for parameter in self._trained.outside:
            parameter.grad = None
        if self._may_be_late and all(context.tasks[name].late_weight for name in weights.totals):
            gathered.late_total = self._late_total(step.late_weights, weights)
            step.settle_late(gathered.late_total)
        return gathered

    def _run_in_turn(self, weights: Weights, step: MicrobatchStep) -> None:
        execution, parts = self._execution, [weights.of(task) for task in weights.totals]
        for part in parts:
            last = part is parts[-1]
            passes = self._context.cuts.passes(self._context.tasks, part.work)
            execution.pad_passes(passes, self._dummy, backward=True, kind=next(iter(part.totals)), last=last)
            self._recovery.runs(step)
            execution.trainer.run(execution.plan(step.lay_out(part.work), last), step)

    @contextmanager
    def _dummy(self, microbatch: Microbatch) -> Generator[MicrobatchStep]:
        step = MicrobatchStep.dummy(self._context, microbatch)
        with self._rollback.buffers.unchanged(), step:
            self._recovery.runs(step)
            yield step

    def _late_total(self, late: dict[int, Tensor], weights: Weights) -> Tensor:
        dtype = torch.float32 if self._context.device.type == "mps" else torch.float64  # mps has no float64
        each = torch.zeros(weights.num_microbatches, dtype=dtype, device=self._context.device)
        for microbatch, weight in late.items():
            each[microbatch] = weight
        self._execution.group.sum(each)()
        return each.sum()
