"""Runs the micro-batches of an update forward and backward."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recording import Recording
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.rollback import Rollback
from evenstep.train.update.weigh import Weights


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Leaves the gradients of an update's micro-batches in `.grad`, summed over all ranks.

    With S the loss scale and all sums over micro-batches and ranks, a gradient is S·Σ_t λ_t·Σ∇S_m / Σw_m, or S·Σ∇S_m of
    a task whose weight is late.
    """

    context: TrainContext
    execution: Execution
    recovery: Recovery
    rollback: Rollback
    trained: TrainedParameters

    def __call__(self, weights: Weights, update: int) -> MicrobatchResults:
        self.rollback.forget_gradients(weights.dealing)
        recording = Recording(self.context, weights, update, "train/")
        step = MicrobatchStep(
            self.context, weights, recording, path=(update,), update=update, factor=self.context.loss_scale.value
        )
        # where ranks run passes together, one task after the other, each with the same number of passes on all ranks
        turns = [weights.of(task) for task in weights.totals] if self.execution.reducers.per_pass else [weights]
        with step:
            for part in turns:
                last = part is turns[-1]
                self._pad(part, last=last)
                self.recovery.watch(step)
                self.execution.trainer.run(self.execution.plan(step.lay_out(part.work), last), step)
        for parameter in self.trained.outside:
            parameter.grad = None
        results = recording.gathered
        if all(self.context.tasks[name].late_weight for name in weights.totals):
            results.late_total = self._late_total(recording.late_weights, weights)
            recording.settle_late(results.late_total)
        return results

    def _pad(self, part: Weights, *, last: bool) -> None:
        if not self.execution.reducers.per_pass:
            return
        passes = self.context.cuts.passes(self.context.tasks, part.work)
        (task,) = part.totals
        self.execution.pad_passes(self.context, passes, kind=task, backward=True, last=last, watch=self.recovery.watch)

    def _late_total(self, late: dict[int, Tensor], weights: Weights) -> Tensor:
        dtype = torch.float32 if self.context.device.type == "mps" else torch.float64  # mps has no float64
        each = torch.zeros(weights.num_microbatches, dtype=dtype, device=self.context.device)
        for microbatch, weight in late.items():
            each[microbatch] = weight
        self.execution.group.sum(each)()
        return each.sum()
