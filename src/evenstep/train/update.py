"""One update: weigh → plan → run → judge → apply.

Everything that depends on how the run is set up is an object that was chosen when it was built: the strategy, the
precision, the way of applying. The update asks nothing about modes. It does not count, log, save or decide what to do
about an abort; that is the loop's. Until it applies, it may be begun anew at any point (`recovery`).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from math import fsum
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from evenstep.data import GlobalBatch, Microbatch, Position
from evenstep.errors import TaskError
from evenstep.events import Incident, StepBegin, StepEnd
from evenstep.internals import profiler_runs
from evenstep.memory import give_back, is_out_of_memory
from evenstep.names import named_parameters
from evenstep.nothing import NOTHING
from evenstep.optim.apply import Apply, gradients
from evenstep.optim.ema import Ema
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.stepping import Steps
from evenstep.train.buffers import Buffers
from evenstep.train.context import MicrobatchResults, TrainContext
from evenstep.train.execution import Execution
from evenstep.train.failures import FailurePolicy
from evenstep.train.failures.causes import FailureCause, find_causes
from evenstep.train.layout_dependence import Dependence
from evenstep.train.memory.fit import fitting, state_allocated
from evenstep.train.memory.split_limit import SplitLimit
from evenstep.train.memory.sub_batch import part_of, whole_of
from evenstep.train.microbatch import MicrobatchStep
from evenstep.train.outcome import PendingUpdate
from evenstep.train.progress import Progress
from evenstep.train.recovery import Recovery
from evenstep.train.tasks.combine import Combine
from evenstep.train.tasks.late_weights import build_gather
from evenstep.train.tasks.tasks import StatesOfTasks
from evenstep.train.trained import TrainedParameters
from evenstep.train.weigh import Weights, weigh


@final
class Update:
    """Executes updates of one model.

    Args:
        parameters: those of the model that are clipped and stepped together, on whichever rank.
        context: task, precision, device and recording.
        execution: how forwards and backwards are run, and gradients shared.
        apply: how a gradient is applied.
        steps: in which format the optimizer takes its step.
        ema: the average that follows the parameters, or None.
        learning_rates: the optimizer's, for each update.
        cuts: how finely micro-batches are cut to fit into this rank's memory.
        on_out_of_memory: the policy for micro-batches that don't fit: retry, cut in two, or stop.
        trained: which of the model's parameters are trained now.
        combine: what is made of the tasks' separate gradients; None accumulates them into one.
        unkeyed: what randomness is not keyed by layer though it would be in stages, for people.
        looks: called with the number of each update after its passes, to say what they have shown.

    Attributes:
        trained: see the arguments.
        learning_rates: see the arguments.
        is_computing: whether an update is being made now.
        is_whole: False if an error came while parameters were changed, so that they are those of no update.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        context: TrainContext,
        execution: Execution,
        apply: Apply,
        steps: Steps,
        ema: Ema | None,
        learning_rates: LearningRates,
        cuts: SplitLimit,
        on_out_of_memory: FailurePolicy,
        report: Callable[[Incident], None],
        trained: TrainedParameters,
        combine: Combine | None = None,
        unkeyed: str = "",
        looks: Sequence[Callable[[int], None]] = (),
    ) -> None:
        self._parameters = parameters
        self.trained = trained
        self._may_be_late = any(task.late_weight for task in context.tasks.values())
        self._sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        self._model = model
        self._context = context
        self._optimizer = optimizer
        self._execution = execution
        self._cuts = cuts
        self._recovery = Recovery(
            execution=execution, tasks=context.tasks, cuts=cuts, report=report, on_out_of_memory=on_out_of_memory
        )
        self._apply, self._steps = apply, steps
        self._ema = ema
        self.learning_rates = learning_rates
        self._buffers = Buffers(model)
        dependence = Dependence(
            buffers=self._buffers, randomness=context.randomness, unkeyed=unkeyed, execution=execution, report=report
        )
        self._looks = (dependence.look, *looks)
        self.is_whole, self.is_computing = True, False
        self._is_unjudged = False  # whether passes have changed buffers, and nobody has said yet whether that stays
        self._in_doubt: Callable[[], PendingUpdate] | None = None
        self._states = StatesOfTasks(context.tasks.values())
        self._begun: tuple[int, Position] | None = None  # the update that was computed last, and its batch
        self._promised = 0  # the update that this rank has promised to apply, at whatever loss scale it fits
        self._gather: Callable[[Weights, int], MicrobatchResults] = self._accumulate
        if combine is not None:
            held = {id(one) for one in parameters}
            by_name = {name: one for name, one in named_parameters(model).items() if id(one) in held}
            self._gather = build_gather(self._accumulate, combine, by_name, context, execution)

    def __call__(self, batch: GlobalBatch, before: Progress) -> PendingUpdate:
        """Execute the update that follows `before` with `batch`.

        With S the loss scale and all sums over micro-batches and ranks, the parameters' gradients become
        S·Σ_t λ_t·Σ∇S_m / Σw_m, or S·Σ∇S_m where the weight is late; what is left of S / Σw_m goes into the divisor of
        `Apply`.
        """
        update = before.update + 1
        self.is_computing = True
        try:
            if self._begun != (update, batch.position):
                self._begun, self._context.lent.spoiled = (update, batch.position), None
            self._check_unspoilt()
            self.begin()
            self._is_unjudged = True
            self.trained.follow()
            if not self._model.training:
                raise TaskError(
                    f"update {update} trains a model that is in evaluation mode; something has called `eval()` on it "
                    f"and not `train()` afterwards. Freeze single layers by calling `eval()` on those."
                )
            compute = partial(self._weigh_and_run, batch, before)
            self._in_doubt = self._recovery.until_done(f"update {update}", update, compute, self._discarding())
            if self._promised != update:
                self._promised = update
                self._execution.reducers.promise()
            return self.carry_out()
        except RuntimeError:
            self._refuse_sparse()
            raise
        finally:
            self.is_computing = False

    @property
    def is_in_doubt(self) -> bool:
        """Whether a rank was lost while all promised to apply what each has computed by itself: others may have."""
        return self._in_doubt is not None

    def carry_out(self) -> PendingUpdate:
        """Apply the update that is computed."""
        apply, self._in_doubt = self._in_doubt, None
        assert apply is not None, "it has been computed"
        return apply()

    def _weigh_and_run(self, batch: GlobalBatch, before: Progress) -> Callable[[], PendingUpdate]:
        """Compute the update's gradients and their squared norm; gives what applies them."""
        update, weights = before.update + 1, self.weigh(batch)
        self._context.phases.lap("weigh")
        if not weights.totals:  # nobody has work
            return partial(self._judge_and_apply, batch, before, weights, MicrobatchResults(), [], None)
        gathered = self._gather(weights, update)
        if self._buffers.exist:
            self._buffers.settle()
            self._buffers.find()
        self.look(update)
        self._execution.reducers.share_buffers(self._buffers)
        self._buffers.find_received()
        grads = gradients(self._parameters, sparse=self._sparse)
        squared = self._execution.norms.squared(grads)
        return partial(self._judge_and_apply, batch, before, weights, gathered, grads, squared)

    def _judge_and_apply(
        self,
        batch: GlobalBatch,
        before: Progress,
        weights: Weights,
        gathered: MicrobatchResults,
        grads: list[Tensor],
        squared: Tensor | None,
    ) -> PendingUpdate:
        """Step the optimizer if the gradient is finite; gives how the update ended.

        Args:
            squared: ‖g‖₂² over all parameters, stages and shards; None where nobody has work, or no task gave a loss.
        """
        update = before.update + 1
        rates = self.learning_rates(update, batch.position.epoch)
        if squared is None:  # nobody has work, or no loss of what is trained
            self._restore()
            return PendingUpdate(
                batch=batch,
                before=before,
                precision=self._context.precision.state,
                aborted=1.0,
                total=0.0,
                skipped_samples=weights.skipped_samples,
            )
        late, scale = gathered.late_total, self._context.precision.scale
        total, divisor = (weights.total, scale) if late is None else (late, scale * late)
        if late is None and (several := gathered.late_totals):
            total = fsum(one for name, one in weights.totals.items() if name not in several) + sum(several.values())
            if several.keys() == weights.totals.keys():
                divisor = scale * (total > 0)  # of nothing but weights of 0 there is no gradient
        self.is_whole = False  # until all that follows has been applied
        begin = partial(StepBegin, update=update, divisor=divisor)
        named = record_function("apply") if profiler_runs() else NOTHING
        with named, self._context.bus.span("step", begin, lambda error: StepEnd(update=update)):
            applied = self._apply(grads, squared, divisor, update)
            self._execution.reducers.after_step()
        self._buffers.restore(applied.aborted)
        self._is_unjudged = False
        if not isinstance(applied.aborted, Tensor) and applied.aborted:  # on a device it is known too late
            self._states.put_back()
        # a verdict that is still on the device is not read here: the average follows it there; of ranks that step alone
        # it follows what they share
        is_made = isinstance(applied.aborted, Tensor) or applied.aborted == 0.0
        if self._ema is not None and is_made and not self._execution.reducers.is_alone:
            self._ema.after_update(update, applied.aborted)
        self.is_whole = True
        put = self._context.storage.put
        put("train/grad_norm", applied.norm, update=update)
        for name, rate in zip(self.learning_rates.names, rates, strict=True):
            put(name, rate, update=update)
        return PendingUpdate(
            batch=batch,
            before=before,
            precision=self._context.precision.state,
            aborted=applied.aborted,
            total=total,
            norm=applied.norm,
            skipped_samples=weights.skipped_samples,
            gathered=gathered,
        )

    def _refuse_sparse(self) -> None:
        """Raise TaskError where the backward has left a sparse gradient that no module has announced."""
        for name, parameter in () if self._sparse else named_parameters(self._model).items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TaskError(
                    f"the gradient of `{name}` is sparse, which a trainer must know when it is built: say "
                    f"`self.sparse = True` in its module, as `nn.Embedding(…, sparse=True)` does, to train it in one "
                    f"process, or compute it without `sparse=True`."
                )

    def _again(self, place: str, update: int, compute: Callable[[], object]) -> None:
        """Compute something of an aborted update with all ranks, to look at it; buffers stay as they were."""
        self._check_unspoilt()
        self._is_unjudged = True
        self._recovery.until_done(place, update, compute, self._discarding())
        self._restore()
        self._states.put_back()

    def _discarding(self) -> Callable[[], None]:
        """What undoes a try that begins now."""
        self._states.begin()
        return partial(self._discard_try, self._context.storage.mark())

    def _discard_try(self, mark: tuple[int, int]) -> None:
        self._discard(mark)
        self._buffers.restore(1.0)
        self._states.put_back()
        self._check_unspoilt()

    def _check_unspoilt(self) -> None:
        """Raise TaskError where what is done again would begin with a batch that a task has written into."""
        if (name := self._context.lent.spoiled) is not None:
            raise TaskError(
                f"the update must be done again, but {type(self._context.tasks[name]).__name__} has written into the "
                f"batch that it was given, which nobody had seen before. Let the task write into a copy of its own "
                f"(`x = x / 255` for `x.div_(255)`), or leave `check_loss` on: where batches can be cut in two it is "
                f"seen in time, and copies are made."
            )

    def look(self, update: int) -> None:
        """Say what the update's passes have shown that is worth knowing, once."""
        for look in self._looks:
            look(update)

    def begin(self) -> None:
        """Take the buffers as they are: whatever the user did to them since the last update stays."""
        if self._buffers.exist:
            self._buffers.begin()

    def fit(self, batch: GlobalBatch) -> None:
        """Find out how much fits: try ever larger parts of this rank's first micro-batch, forward and backward.

        The optimizer's state is there while trying, so that it has its place in memory; nothing of it all remains.
        The cut of the largest part that fits is kept, or one cut finer where the device was nearly full.
        """
        if not batch.microbatches or self._cuts.limit is not None:
            return
        with state_allocated(self._optimizer, self._steps):
            first = batch.microbatches[0]
            task, fits = self._context.tasks[first.task], partial(self._fits, first.task)
            device = self._context.device
            self._cuts.limit = fitting(task, whole_of(first), fits, device=device)
        self._discard(self._context.storage.mark())

    def _fits(self, task: str, data: object) -> bool:
        """Whether the gradient of `data` can be computed in the memory that there is."""
        weights = Weights.of_one(Microbatch(index=0, data=data, num_samples=1, task=task), weight=1.0)
        mark = self._context.storage.mark()
        self._discard(mark)
        step = self._step(weights, path=("fit",), update=0)
        self._is_unjudged = True
        fits = True
        try:
            with step:
                self._execution.try_one(step)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        self._discard(mark)
        self._restore()
        give_back()
        return fits

    def abandon(self) -> None:
        """Undo what an update that has raised in the middle did to the buffers, and be ready for another.

        What raises between updates undoes nothing: hooks may have changed buffers since the last one.
        """
        self._in_doubt, self._promised = None, 0
        if self._is_unjudged:
            self._restore()
        self._execution.reset()
        self.resume()

    def _restore(self) -> None:
        """Give buffers back as they were before the passes."""
        self._buffers.restore(1.0)
        self._is_unjudged = False

    def rerun(self, batch: GlobalBatch, update: int) -> None:
        """Compute the gradients of an aborted update once more, to look at them; nothing is applied."""
        place = f"update {update}, which is looked at again"
        self._again(place, update, lambda: self._gather(self.weigh(batch), update))

    @contextmanager
    def at_lowest_scale(self) -> Generator[None]:
        """Inside, losses are scaled as little as the precision ever does: what is not finite then is not its fault."""
        precision = self._context.precision
        before, precision.scale = precision.scale, precision.lowest_scale
        try:
            yield
        finally:
            precision.scale = before

    def is_finite(self, batch: GlobalBatch, update: int) -> bool:
        """Whether the gradient of an aborted update is finite if it is computed again; all ranks ask together."""
        self.rerun(batch, update)
        return self._has_finite_gradient()

    def _has_finite_gradient(self) -> bool:
        squared = self._execution.norms.squared(gradients(self._parameters, sparse=self._sparse))
        return squared is None or bool(squared.isfinite())

    def find_causes(self, batch: GlobalBatch, gathered: MicrobatchResults, update: int) -> list[FailureCause]:
        """Whose fault it is that an update's gradient is not finite: all ranks ask together, and get the same.

        Where every loss is finite, each task's gradient is computed once more by itself.
        """
        causes = find_causes(gathered, self._execution.together)
        if causes or len(self._context.tasks) == 1:
            return causes
        weights = self.weigh(batch)
        for name in weights.totals:
            place = f"task {name} of update {update}"
            self._again(place, update, lambda name=name: self._accumulate(weights.of(name), update))
            if not self._has_finite_gradient():
                causes.append(
                    FailureCause(microbatch=-1, task=name, why="its gradient is not finite, though its losses are")
                )
        return causes

    def weigh(self, batch: GlobalBatch) -> Weights:
        """Count the weights of an update; see `weigh`."""
        context = self._context
        group, tolerant = self._execution.reducers.together, context.poison is not None
        stamp = 1.0 if group.ranks == 1 else 1.0 + (self.trained.stamp ^ self.learning_rates.stamp)
        return weigh(context.tasks, batch, group, tolerant=tolerant, stamp=stamp)

    def resume(self) -> None:
        """Apply updates again after the loop has answered an abort."""
        self._apply.resume()

    def _accumulate(self, weights: Weights, update: int) -> MicrobatchResults:
        """Run the micro-batches: their gradients are then in `.grad`, summed over all ranks."""
        execution = self._execution
        self._forget_gradients()
        with (
            self._context.teaching(*weights.totals),
            self._step(weights, path=(update,), update=update) as step,
        ):
            if execution.reducers.in_turn:
                self._run_in_turn(weights, step)
            else:
                self._recovery.runs(step)
                execution.trainer.run(execution.plan(step.lay_out(weights.work), True), step)
        gathered = step.gathered
        for parameter in self.trained.outside:
            parameter.grad = None
        if self._may_be_late and all(self._context.tasks[name].late_weight for name in weights.totals):
            gathered.late_total = total = self._late_total(step.late_weights, weights)
            gathered.late_totals = dict.fromkeys(weights.totals, total)
            step.settle_late(total)
        return gathered

    def _run_in_turn(self, weights: Weights, step: MicrobatchStep) -> None:
        """Run one task's micro-batches after the other's, as all ranks do."""
        execution, parts = self._execution, [weights.of(task) for task in weights.totals]
        for part in parts:
            last = part is parts[-1]
            passes = self._cuts.passes(self._context.tasks, part.work)
            execution.pad_passes(passes, self._dummy, backward=True, kind=next(iter(part.totals)), last=last)
            self._recovery.runs(step)
            execution.trainer.run(execution.plan(step.lay_out(part.work), last), step)

    def _step(self, weights: Weights, *, path: tuple[int | str, ...], update: int) -> MicrobatchStep:
        factor, cuts = self._context.precision.scale, self._cuts
        return MicrobatchStep(
            self._context, weights, path=path, update=update, factor=factor, prefix="train/", cuts=cuts
        )

    def _discard(self, mark: tuple[int, int]) -> None:
        """Forget what a failed try has left."""
        self._context.storage.drop_after(mark)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self.trained.with_grad:
            parameter.grad = None
        self._execution.begin()

    @contextmanager
    def _dummy(self, microbatch: Microbatch) -> Generator[MicrobatchStep]:
        """A micro-batch that counts nowhere, after which buffers are as before."""
        task = self._context.tasks[microbatch.task]
        first = part_of(microbatch, self._cuts.pieces(task, whole_of(microbatch))[0])
        with self._buffers.unchanged(), MicrobatchStep.dummy(self._context, first) as step:
            self._recovery.runs(step)
            yield step

    def _late_total(self, late: dict[int, Tensor], weights: Weights) -> Tensor:
        """Σw_m over all ranks, in the order of the micro-batches' numbers whoever ran them."""
        dtype = torch.float32 if self._context.device.type == "mps" else torch.float64  # mps has no float64
        each = torch.zeros(weights.num_microbatches, dtype=dtype, device=self._context.device)
        for microbatch, weight in late.items():
            each[microbatch] = weight
        self._execution.together.sum(each)()
        return each.sum()
