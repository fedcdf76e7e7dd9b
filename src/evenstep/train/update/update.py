"""One update: weigh → run → judge → apply."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from evenstep.data import GlobalBatch
from evenstep.errors import EvenstepError, TaskError
from evenstep.events import StepEvent
from evenstep.internals import profiler_runs
from evenstep.keys import branch, key_below
from evenstep.lazy import load
from evenstep.optim.apply import Apply, gradients
from evenstep.optim.ema import Average
from evenstep.optim.learning_rate import LearningRates
from evenstep.tensors import named_parameters
from evenstep.train.progress import Progress
from evenstep.train.randomness import seed_all
from evenstep.train.tasks.weighting import Combine
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep, TrainContext
from evenstep.train.update.outcome import Passes, PendingUpdate
from evenstep.train.update.recording import Recording
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.rollback import Rollback
from evenstep.train.update.weigh import Weights, check_pipeline, weigh


@final
class Update:
    """Executes updates of one model: weigh → run → judge → apply.

    Args:
        parameters: of the model, that are clipped and stepped together, on any rank.
        apply: clips and steps, if the gradient is finite.
        may_cut: False to stop where a micro-batch does not fit.
        combine: method that combines the tasks' separate gradients; None accumulates them into one.

    Attributes:
        rollback: undoes the changes of passes.
        reads_at_once: True if the host knows at once if an update was applied.
        is_whole: False if an error came while the state was changed, and can't be taken back.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        context: TrainContext,
        execution: Execution,
        apply: Apply,
        average: Average | None,
        learning_rates: LearningRates,
        may_cut: bool,
        trained: TrainedParameters,
        combine: Combine | None = None,
    ) -> None:
        self.model = model
        self.trained = trained
        self.average = average
        self.learning_rates = learning_rates
        self.rollback = Rollback(model, context, execution.buffers, execution.reducers, trained)
        self.reads_at_once = apply.reads_at_once
        self.is_whole = True
        self._parameters = parameters
        self._sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        self._context = context
        self._execution = execution
        self._apply = apply
        self._branch_of_steps = branch(context.seed, "step")
        self._recovery = Recovery(execution=execution, context=context, may_cut=may_cut)
        self._run: Callable[[Weights, int], Passes] = self._run_passes
        if combine is not None:
            held = {id(one) for one in parameters}
            by_name = {name: one for name, one in named_parameters(model).items() if id(one) in held}
            self._run = load("evenstep.contrib.multitask:PerTaskGradients")(
                accumulate=self._run_passes, combine=combine, parameters=by_name, context=context, execution=execution
            )
        self._has_checked_pipeline = False

    def __call__(self, batch: GlobalBatch, before: Progress) -> PendingUpdate:
        """Execute the update that follows `before` with `batch`."""
        scale = self._context.loss_scale.state_dict()
        pending = PendingUpdate(batch=batch, before=before, loss_scale=scale, rates=self.learning_rates.last)
        update = pending.number
        self.rollback.begin(update, batch)
        self.trained.follow()
        if not self.model.training:
            raise TaskError(
                f"update {update} trains a model that is in evaluation mode; something has called `eval()` on it and "
                f"not `train()` afterwards. Freeze single layers by calling `eval()` on those."
            )
        passes = Passes({}, 0.0)
        squared: Tensor | None = None
        for attempt in self._recovery.attempts(f"update {update}", update, self.rollback.begin_passes()):
            with attempt:  # again, if a rank runs out of memory
                weights = self.weigh(batch)
                pending.skipped_samples = weights.skipped_samples
                if weights.totals:  # some rank has work
                    passes = self._run(weights, update)
                    squared = self._judge()
        rates = self.learning_rates(update, batch.position.epoch)
        if squared is None:  # nothing to train on, on any rank
            is_idle = self._execution.reducers.is_idle(batch.num_microbatches, len(batch.microbatches))
            pending.aborted = 0.0 if is_idle else 1.0
            self.rollback.judge(1.0)
        else:
            self._step(pending, passes, squared)
            self.record(pending, rates)
        return pending

    def weigh(self, batch: GlobalBatch) -> Weights:
        """Count the weights of an update; see `weigh`."""
        context, reducers, pipeline = self._context, self._execution.reducers, self._execution.pipeline
        stamp = 1.0 if reducers.group.ranks == 1 else 1.0 + (self.trained.stamp ^ self.learning_rates.checksum)
        unseen = reducers.has_unseen_buffers
        weights = weigh(
            context.tasks, batch, reducers.group, blocks=reducers.blocks, stamp=stamp, has_unseen_buffers=unseen
        )
        if weights.has_unseen_buffers:
            self.share_unseen_buffers()
        if pipeline.ranks > 1:
            check_pipeline(pipeline, batch, weights, with_data=not self._has_checked_pipeline)
            self._has_checked_pipeline = True
        context.phases.lap("weigh")
        return weights

    def share_unseen_buffers(self) -> None:
        """Between updates: make equal on all ranks the buffers that have changed since they were shared."""
        followed = () if self.average is None else self.average.followed
        self._execution.reducers.share_unseen_buffers({id(one): average for one, average in followed})
        self.rollback.buffers.restore(0.0)  # a roll-back goes back to the shared values

    def _run_passes(self, weights: Weights, update: int) -> Passes:
        """Run micro-batches forward and backward; leaves their gradients in `.grad`, summed over all ranks.

        With S the loss scale, a gradient is S·Σ_t λ_t·Σ∇S_m / Σw_m; of a task whose weight is late, S·Σ∇S_m.
        """
        context, execution = self._context, self._execution
        scale, coefficient = context.loss_scale.value, context.coefficients.value
        self.rollback.forget_gradients(weights.dealing)
        recording = Recording(context, weights, update, "train/")
        factors = {name: scale * coefficient(name, update) / divisor for name, divisor in weights.divisors.items()}
        works = {"": weights.work}
        if execution.reducers.per_pass:  # one task after the other, with the same number of passes on all ranks
            works = {task: weights.of(task).work for task in weights.totals}
        for place, (kind, work) in enumerate(works.items(), start=1):
            is_last = place == len(works)
            with MicrobatchStep(context, work, recording.take, path=(update,), update=update, factors=factors) as step:
                execution.begin(step, kind=kind, backward=True, last=is_last)
                execution.runner.run(execution.plan(step.numbers, is_last), step)
        for parameter in self.trained.outside.values():
            parameter.grad = None
        if not all(context.tasks[name].late_weight for name in weights.totals):
            return Passes(recording.losses, weights.total)
        dtype = torch.float32 if context.device.type == "mps" else torch.float64  # mps has no float64
        each = torch.zeros(weights.num_microbatches, dtype=dtype, device=context.device)
        for microbatch, weight in recording.late_weights.items():
            each[microbatch] = weight
        execution.group.sum(each)()
        total = each.sum()
        recording.settle_late(total)
        return Passes(recording.losses, total, total)

    def _judge(self) -> Tensor | None:
        """‖g‖₂² over all stages and shards: the gradient is applied if that is finite; None without any gradient."""
        self.rollback.check_writes()
        self.rollback.buffers.settle()
        self._execution.reducers.share_buffers(self.rollback.buffers)
        return self._execution.norms.squared(gradients(self._parameters, sparse=self._sparse))

    def _step(self, pending: PendingUpdate, passes: Passes, squared: Tensor) -> None:
        """Step the optimizer if the gradient is finite."""
        context, update = self._context, pending.number
        divisor = context.loss_scale.value * passes.divisor
        pending.losses = passes.losses
        pending.total = passes.total
        self.is_whole = False  # until all that follows has been applied
        event = StepEvent(update=update, divisor=divisor)
        named = record_function("apply") if profiler_runs() else nullcontext()
        with named, context.bus.span("step", lambda: event, lambda error: event):
            if self._apply.stepper.may_draw:  # the same numbers on all ranks
                seed_all(context.device, key_below(self._branch_of_steps, update))
            grads = gradients(self._parameters, sparse=self._sparse)  # a hook may have put other tensors there
            pending.norm, pending.aborted = self._apply(grads, squared, divisor, update)
            self._execution.reducers.after_step()
        self.rollback.judge(pending.aborted)
        # a verdict that is still on the device is not read here: the average follows it there
        if self.average is not None and not pending.is_known_aborted:
            self.average.after_update(update, pending.aborted)
        self.is_whole = True

    def record(self, pending: PendingUpdate, rates: Sequence[float | Tensor]) -> None:
        """Record the norm of an update's gradient, its learning rates and its loss scale."""
        put, update = self._context.storage.put, pending.number
        if pending.norm is not None:
            put("train/grad_norm", pending.norm, update=update)
        for name, rate in zip(self.learning_rates.names, rates, strict=True):
            put(name, rate, update=update)
        if self._context.precision.retries_overflow:
            put("train/loss_scale", self._context.loss_scale.value, update=update)

    def require_whole(self) -> None:
        """Raise EvenstepError where an error has left the state of no update."""
        if not self.is_whole:
            raise EvenstepError(
                "an error came while the state was changed, so it belongs to no update; load another state, by "
                "`load_state_dict` or a trainer's `resume`, or build model, optimizer and engine again."
            )

    def abandon(self, aborted: int | None = None) -> None:
        """Undo an update that has raised, and those from number `aborted` on, which had turned out to be aborted.

        Errors between updates undo nothing: hooks may have changed buffers since the last one.
        """
        self.rollback.settle(aborted)
        self._execution.reset()
        self.resume()

    def settle(self, aborted: int | None) -> None:
        """The verdicts of all updates so far are known: those from number `aborted` on have changed nothing."""
        was_whole = self.is_whole
        self.is_whole = False
        self.rollback.settle(aborted)
        self.is_whole = was_whole

    def resume(self, halted: Tensor | None = None) -> None:
        """Apply updates again after the loop has answered an abort, unless `halted` is 1 on the device."""
        self._apply.resume(halted)

    def rerun(self, batch: GlobalBatch, update: int) -> None:
        """Compute the gradients of an update once more, to look at them; nothing is applied."""
        place = f"update {update}, which is looked at again"
        for attempt in self._recovery.attempts(place, update, self.rollback.begin_passes()):
            with attempt:
                self._run(self.weigh(batch), update)
        self.rollback.judge(1.0)
