"""One update: weigh → plan → run → judge → apply."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from evenstep.data import GlobalBatch, Microbatch
from evenstep.errors import TaskError
from evenstep.events import Incident, StepEvent
from evenstep.internals import profiler_runs
from evenstep.keys import branch, key_below
from evenstep.lazy import load
from evenstep.optim.apply import Apply, gradients
from evenstep.optim.ema import Average
from evenstep.optim.learning_rate import LearningRates
from evenstep.tensors import named_parameters
from evenstep.train.failures import FailurePolicy
from evenstep.train.progress import Progress
from evenstep.train.randomness import seed_all
from evenstep.train.tasks.weighting import Combine
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import MicrobatchResults, TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.outcome import PendingUpdate
from evenstep.train.update.recovery import Attempt, Recovery
from evenstep.train.update.rollback import Rollback
from evenstep.train.update.weigh import Weights, check_batches, check_pipeline_weights, weigh


@final
class Update:
    """Executes updates of one model: weigh → run → judge → apply.

    Args:
        parameters: those of the model that are clipped and stepped together, on whichever rank.
        on_out_of_memory: the policy for micro-batches that don't fit: retry, cut in two, or stop.
        combine: the method that combines the tasks' separate gradients; None accumulates them into one.

    Attributes:
        rollback: undoes what passes changed.
        is_computing: whether an update is being made now.
        reads_at_once: whether the host knows at once if an update was applied.
        is_whole: False if an error came while the state was changed and can't be taken back: it is that of no update.
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
        on_out_of_memory: FailurePolicy,
        report: Callable[[Incident], None],
        trained: TrainedParameters,
        combine: Combine | None = None,
    ) -> None:
        self._model, self._parameters, self.trained = model, parameters, trained
        self._sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        self._context, self._execution = context, execution
        self.reads_at_once = apply.reads_at_once
        self._apply, self.average, self.learning_rates = apply, average, learning_rates
        self._branch_of_steps = branch(context.seed, "step")
        self._recovery = Recovery(
            execution=execution, context=context, report=report, on_out_of_memory=on_out_of_memory
        )
        self.rollback = Rollback(model, context, execution, trained)
        self._run: Callable[[Weights, int], MicrobatchResults] = self._accumulate
        if combine is not None:
            held = {id(one) for one in parameters}
            by_name = {name: one for name, one in named_parameters(model).items() if id(one) in held}
            self._run = load("evenstep.contrib.multitask.per_task:PerTaskGradients")(
                accumulate=self._accumulate, combine=combine, parameters=by_name, context=context, execution=execution
            )
        self.is_whole, self.is_computing = True, False
        self._first = 0  # number of the update that is made first

    def __call__(self, batch: GlobalBatch, before: Progress) -> PendingUpdate:
        """Execute the update that follows `before` with `batch`.

        With S the loss scale and all sums over micro-batches and ranks, the parameters' gradients become
        S·Σ_t λ_t·Σ∇S_m / Σw_m, or S·Σ∇S_m where the weight is late; what is left of S / Σw_m goes into the divisor of
        `Apply`.
        """
        pending = PendingUpdate(
            batch=batch,
            before=before,
            loss_scale=self._context.loss_scale.state_dict(),
            rates=self.learning_rates.last,
            aborted=1.0,
            total=0.0,
        )
        self.is_computing = True
        try:
            self.rollback.begin(pending.number, batch)
            self.trained.follow()
            self._check_mode(pending.number)
            computed = None
            for attempt in self._attempts(f"update {pending.number}", pending.number):
                with attempt:
                    weights = self._weigh(batch, pending)
                    computed = weights, *self._gradients(weights, pending)
            assert computed is not None, "one attempt has succeeded"
            return self._step(pending, *computed)
        except RuntimeError:
            self._refuse_sparse()
            raise
        finally:
            self.is_computing = False

    def _attempts(self, place: str, update: int) -> Iterator[Attempt]:
        return self._recovery.attempts(place, update, self.rollback.begin_passes())

    def _weigh(self, batch: GlobalBatch, pending: PendingUpdate) -> Weights:
        self._first = self._first or pending.number
        if pending.number == self._first and self._execution.pipeline.ranks > 1:
            check_batches(self._execution.pipeline, batch)
        weights = self.weigh(batch)
        pending.skipped_samples = weights.skipped_samples
        self._context.phases.lap("weigh")
        return weights

    def _gradients(self, weights: Weights, pending: PendingUpdate) -> tuple[list[Tensor], Tensor | None]:
        """The gradients, and ‖g‖₂² over all parameters, stages and shards, or None without any."""
        if not weights.totals:  # nobody has work
            return [], None
        pending.gathered = self._run(weights, pending.number)
        self.rollback.check_writes()
        self.rollback.buffers.settle()
        self._execution.reducers.share_buffers(self.rollback.buffers)
        grads = gradients(self._parameters, sparse=self._sparse)
        return grads, self._execution.norms.squared(grads)

    def _accumulate(self, weights: Weights, update: int) -> MicrobatchResults:
        """Leave the gradients of an update's micro-batches in `.grad`, summed over all ranks."""
        context, execution = self._context, self._execution
        self.rollback.forget_gradients(weights.dealing)
        step = MicrobatchStep.of_update(context, weights, update)
        with step:
            if execution.reducers.per_pass:
                self._run_in_turn(weights, step)
            else:
                self._recovery.runs(step)
                execution.trainer.run(execution.plan(step.lay_out(weights.work), True), step)
        for parameter in self.trained.outside:
            parameter.grad = None
        results = step.gathered
        if all(context.tasks[name].late_weight for name in weights.totals):
            results.late_total = self._late_total(step.late_weights, weights)
            step.settle_late(results.late_total)
        return results

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
        with self.rollback.buffers.unchanged(), step:
            self._recovery.runs(step)
            yield step

    def _late_total(self, late: dict[int, Tensor], weights: Weights) -> Tensor:
        dtype = torch.float32 if self._context.device.type == "mps" else torch.float64  # mps has no float64
        each = torch.zeros(weights.num_microbatches, dtype=dtype, device=self._context.device)
        for microbatch, weight in late.items():
            each[microbatch] = weight
        self._execution.group.sum(each)()
        return each.sum()

    def _step(
        self, pending: PendingUpdate, weights: Weights, grads: list[Tensor], squared: Tensor | None
    ) -> PendingUpdate:
        """Step the optimizer if the gradient is finite; gives how the update ended."""
        update, reducers, context = pending.number, self._execution.reducers, self._context
        rates = self.learning_rates(update, pending.batch.position.epoch)
        if squared is None:  # nobody has work, or no loss of what is trained
            self.rollback.judge(1.0)
            if reducers.is_idle(pending.batch.num_microbatches, len(pending.batch.microbatches)):
                pending.aborted = 0.0
            return pending
        pending.total, divisor = self._total_and_divisor(weights, pending.gathered)
        self.is_whole = False  # until all that follows has been applied
        event = StepEvent(update=update, divisor=divisor)
        named = record_function("apply") if profiler_runs() else nullcontext()
        with named, context.bus.span("step", lambda: event, lambda error: event):
            if "before_step" in context.bus.heard:  # which may have put other tensors there
                grads = gradients(self._parameters, sparse=self._sparse)
            if self._apply.may_draw:  # the same numbers on all ranks
                seed_all(context.device, key_below(self._branch_of_steps, update))
            applied = self._apply(grads, squared, divisor, update)
            reducers.after_step()
        pending.aborted, pending.norm = applied.aborted, applied.norm
        self.rollback.judge(pending.aborted)
        # a verdict that is still on the device is not read here: the average follows it there
        if self.average is not None and not pending.is_known_aborted:
            self.average.after_update(update, pending.aborted)
        self.is_whole = True
        context.storage.put("train/grad_norm", pending.norm, update=update)
        for name, rate in zip(self.learning_rates.names, rates, strict=True):
            context.storage.put(name, rate, update=update)
        if context.precision.retries_overflow:
            context.storage.put("train/loss_scale", context.loss_scale.value, update=update)
        return pending

    def _total_and_divisor(
        self, weights: Weights, gathered: MicrobatchResults
    ) -> tuple[float | Tensor, float | Tensor]:
        late, scale = gathered.late_total, self._context.loss_scale.value
        if late is not None:
            return late, scale * late
        if gathered.total is not None:
            return gathered.total, scale * (gathered.total > 0)
        return weights.total, scale

    def _check_mode(self, update: int) -> None:
        if not self._model.training:
            raise TaskError(
                f"update {update} trains a model that is in evaluation mode; something has called `eval()` on it and "
                f"not `train()` afterwards. Freeze single layers by calling `eval()` on those."
            )

    def _refuse_sparse(self) -> None:
        for name, parameter in () if self._sparse else named_parameters(self._model).items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TaskError(
                    f"the gradient of `{name}` is sparse, which a trainer must know when it is built: say "
                    f"`self.sparse = True` in its module, as `nn.Embedding(…, sparse=True)` does, to train it in one "
                    f"process, or compute it without `sparse=True`."
                )

    def begin(self) -> None:
        """Take the buffers as they are: whatever the user did to them since the last update stays."""
        self.rollback.follow()

    def abandon(self, aborted: int | None = None) -> None:
        """Undo what an update that has raised in the middle did, and be ready for another.

        What raises between updates undoes nothing: hooks may have changed buffers since the last one.

        Args:
            aborted: the number of the first update that had turned out to be aborted by then.
        """
        self.rollback.take_back()
        self.rollback.settle(aborted)
        self._execution.reset()
        self.resume()

    def settle(self, aborted: int | None) -> None:
        """The verdicts of all updates so far are known: those from number `aborted` on have changed nothing."""
        was, self.is_whole = self.is_whole, False
        self.rollback.settle(aborted)
        self.is_whole = was

    def resume(self) -> None:
        """Apply updates again after the loop has answered an abort."""
        self._apply.resume()

    def rerun(self, batch: GlobalBatch, update: int) -> None:
        """Compute the gradients of an update once more, to look at them; nothing is applied."""
        place = f"update {update}, which is looked at again"
        for attempt in self._attempts(place, update):
            with attempt:
                self._run(self.weigh(batch), update)
        self.rollback.judge(1.0)

    def has_finite_gradient(self) -> bool:
        squared = self._execution.norms.squared(gradients(self._parameters, sparse=self._sparse))
        return squared is None or bool(squared.isfinite())

    def weigh(self, batch: GlobalBatch) -> Weights:
        """Count the weights of an update; see `weigh`."""
        context = self._context
        group = self._execution.reducers.group
        stamp = 1.0 if group.ranks == 1 else 1.0 + (self.trained.stamp ^ self.learning_rates.checksum)
        blocks = self._execution.reducers.blocks
        weights = weigh(context.tasks, batch, group, blocks=blocks, stamp=stamp)
        if self._execution.pipeline.ranks > 1:
            check_pipeline_weights(self._execution.pipeline, batch, weights)
        return weights
