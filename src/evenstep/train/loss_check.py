"""Checks, before the first update, that the loss of each task is a sum over the units that its weight counts.

A micro-batch runs forward twice whole and once in two halves. Losses and weights of the halves must add up.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from evenstep.data import GlobalBatch, Microbatch
from evenstep.data.tree import copied, tensors_in
from evenstep.errors import LostRankError, TaskError
from evenstep.oom import give_back, is_out_of_memory
from evenstep.parallel.buffers import is_batch_norm
from evenstep.pipeline.compiled import as_written
from evenstep.train.cut import SubBatch, part_of, parts_of, whole_of
from evenstep.train.forwards import evaluating, run_forwards
from evenstep.train.tasks.now import checking_losses
from evenstep.train.tasks.task import Loss, Task, weight_of
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.rollback import Rollback
from evenstep.train.update.weigh import Weights

SIXTEEN_BITS = frozenset({torch.float16, torch.bfloat16})
_OFF = "`train=Training(check_loss=False)`"


@final
@dataclass(frozen=True, slots=True)
class LossValue:
    """Summed loss and weight of a piece of a micro-batch, and the units that a `Loss.of_mean` counted."""

    loss: float
    weight: float
    count: float | None = None


class Tolerance(NamedTuple):
    """Largest difference that rounding makes: of the largest loss, and of each unit where terms cancel."""

    relative: float
    per_unit: float


WIDE = Tolerance(1e-3, 1e-6)
FAST = Tolerance(1e-2, 1e-4)  # kernels of an accelerator may differ with the batch size
NARROW = Tolerance(5e-2, 1e-2)  # computed in 16 bits
_SURE = 0.2  # of the losses: a mean differs from the sum of its halves by more


@final
@dataclass(slots=True, kw_only=True)
class LossCheck:
    """Compares the loss of a micro-batch with the losses of its halves, once for each task.

    Args:
        rollback: restores buffers and task state.
        pending: names of the tasks that are not checked yet.
    """

    model: nn.Module
    context: TrainContext
    execution: Execution
    rollback: Rollback
    pending: set[str]
    _recovery: Recovery = field(init=False)

    def __post_init__(self) -> None:
        self._recovery = Recovery(execution=self.execution, context=self.context)

    def __call__(self, batch: GlobalBatch) -> None:
        """Check the pending tasks of a global batch; all ranks call it together.

        Raises:
            TaskError: on all ranks, for a loss or a weight that does not add up.
        """
        names = dict.fromkeys(part.task for part in batch.parts) or {"": None}
        for name in [one for one in names if one in self.pending and one in self.context.tasks]:
            self.pending.discard(name)
            fault = self._fault(name, [one for one in batch.microbatches if one.task == name])
            for theirs in self.execution.group.gather(fault):
                if theirs:
                    raise TaskError(f"task `{name}`: {theirs}" if name else theirs, field=name)

    def _fault(self, name: str, microbatches: Sequence[Microbatch]) -> str:
        task = self.context.tasks[name]
        one, pieces = self._cut(task, microbatches)
        if not any(self.execution.group.gather(one is not None)):
            return ""
        recorder = _Losses()
        with ExitStack() as around:
            around.enter_context(self.rollback.unchanged())
            around.enter_context(evaluating(self.model, self.context.device, self.context.tasks.values()))
            around.enter_context(checking_losses())
            around.enter_context(as_written())
            # torch's shortcut for attention gives outputs as long as the longest sequence of a piece
            around.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            is_run = self._run(name, one, pieces, recorder)
        if one is None or not is_run or len(recorder.losses) != len(pieces):
            return ""
        values = [_value(task, loss, piece) for loss, piece in zip(recorder.losses, pieces, strict=True)]
        known = [one for one in values if one is not None and math.isfinite(one.loss)]
        if len(known) != len(pieces):
            return ""
        return self._compare(task, one.index, known, self._tolerance(narrow=recorder.narrow))

    def _cut(self, task: Task, microbatches: Sequence[Microbatch]) -> tuple[Microbatch | None, list[SubBatch]]:
        try:
            for one in microbatches:
                whole = self.context.cuts.pieces(task, whole_of(one))[0]
                parts = parts_of(task, whole)
                if len(parts) > 1 and all(_weight(task, piece) > 0 for piece in (whole, *parts)):
                    return one, [whole, whole, *parts]
        except Exception:  # noqa: BLE001
            pass
        return None, []

    def _run(self, name: str, one: Microbatch | None, pieces: list[SubBatch], recorder: "_Losses") -> bool:
        passes = partial(self._passes, name, one, pieces, recorder)
        if self.execution.evaluates_together:

            def all_passes() -> bool:
                is_done = passes()
                self.execution.group.gather(None)  # a rank that is done meets those that run out of memory later
                return is_done

            return bool(self._recovery.once(f"the check of the loss of {name or 'the task'}", all_passes))
        try:
            return passes()
        except LostRankError:
            raise
        except Exception as error:  # noqa: BLE001 - the update raises it again, where it is no matter of the check
            if is_out_of_memory(error):
                give_back()
            return False

    def _passes(self, name: str, one: Microbatch | None, pieces: list[SubBatch], recorder: "_Losses") -> bool:
        work: tuple[Microbatch, ...] = ()
        if one is not None:
            numbered = enumerate(pieces)
            work = tuple(replace(part_of(one, piece), index=n, data=copied(piece.data)) for n, piece in numbered)
        weights = Weights.of_forwards(name, work, num_microbatches=len(work))
        try:
            silent = self.context.silently()
            run_forwards(silent, self.execution, weights, recorder, path=("check",), kind=f"check {name}")
        finally:
            for stage in self.execution.evaluator.stages.values():
                stage.forget()
        return True

    def _tolerance(self, *, narrow: bool) -> Tolerance:
        formats = {parameter.dtype for parameter in self.model.parameters()}
        gathers = self.execution.reducers.gather_dtype
        if narrow or gathers or self.context.precision.name != "32-true" or not formats.isdisjoint(SIXTEEN_BITS):
            return NARROW
        # by the newer of torch's two names: the older one raises where the newer was set
        products: Any = torch.backends.mkldnn
        is_exact = self.context.device.type == "cpu" and products.matmul.fp32_precision in ("none", "ieee")
        return WIDE if is_exact else FAST

    def _compare(self, task: Task, number: int, values: Sequence[LossValue], tolerance: Tolerance) -> str:
        kind = type(task).__name__
        whole, again, *halves = values
        scale = max(abs(one.loss) for one in values)
        is_random = abs(whole.loss - again.loss) > tolerance.relative / 10 * scale
        if is_random and task.late_weight:
            return ""
        weight = math.fsum(half.weight for half in halves)
        if not math.isclose(weight, whole.weight, rel_tol=1e-6):
            return (
                f"the weight of micro-batch {number} is {whole.weight:g}, but its parts weigh {weight:g} together. "
                f"`{kind}.weight` must count the units of the summed loss, such as `(labels != -100).sum()`. If it is "
                f"meant so: {_OFF}."
            )
        norms = [part for part in self.model.modules() if is_batch_norm(part) and not part.track_running_stats]
        if not is_random and not norms and differs(whole, halves, tolerance):
            total = math.fsum(half.loss for half in halves)
            return (
                f"the loss of micro-batch {number} is {whole.loss:.4g}, but the losses of its parts add up to "
                f'{total:.4g}. `{kind}.loss` must be the sum over its units: `reduction="sum"`, or `Loss.of_mean(mean, '
                f"count)`. If a loss of the whole micro-batch is meant: {_OFF}."
            )
        if whole.count is not None and not task.late_weight and not math.isclose(whole.count, whole.weight):
            return (
                f"the loss of micro-batch {number} is a mean over {whole.count:g} units, but `{kind}.weight` gives "
                f"{whole.weight:g}. Count the same units, or set `late_weight = True`."
            )
        return ""


def differs(whole: LossValue, parts: Sequence[LossValue], tolerance: Tolerance) -> bool:
    """True if the loss of the whole can't be the sum over its parts.

    >>> halves = [LossValue(1.0, 2), LossValue(2.0, 2)]
    >>> differs(LossValue(3.0, 4), halves, WIDE), differs(LossValue(1.5, 4), halves, WIDE)
    (False, True)
    """
    losses = [part.loss for part in parts]
    scale = max(map(abs, (whole.loss, *losses)))
    excess = abs(math.fsum(losses) - whole.loss)
    if excess <= tolerance.relative * scale:
        return False
    least, most = min(losses), max(losses)
    margin = tolerance.relative * scale
    is_mean = least - margin <= whole.loss <= most + margin and least * most > 0 and excess > _SURE * scale
    return (is_mean and scale > 10 * tolerance.per_unit) or excess > 100 * tolerance.per_unit * max(whole.weight, 1.0)


@final
@dataclass(slots=True)
class _Losses:
    losses: list[Any] = field(default_factory=list)
    narrow: bool = False

    def see(self, task: Task, output: Any, batch: Any) -> Any:
        self.narrow = self.narrow or any(one.dtype in SIXTEEN_BITS for one in tensors_in(output))
        return task.loss(output, batch)

    def take(self, task: Task, one: Microbatch, piece: SubBatch, seen: Any) -> None:
        self.losses.append(seen)


def _weight(task: Task, piece: SubBatch) -> float:
    return 1.0 if task.late_weight else weight_of(task, piece.data, "a part of a micro-batch", piece.num_samples)


def _value(task: Task, given: Any, piece: SubBatch) -> LossValue | None:
    loss = given if isinstance(given, Loss) else Loss(given)
    total: Any = loss.sum
    if not (isinstance(total, Tensor) and total.ndim == 0 and total.is_floating_point() and not total.is_meta):
        return None
    late: Any = loss.count if loss.weight is None else loss.weight
    try:
        count = None if loss.count is None else float(loss.count)
        weight = _weight(task, piece) if not task.late_weight or late is None else float(late)
    except (TypeError, ValueError, RuntimeError):
        return None
    return LossValue(float(total.detach()), weight, count)
