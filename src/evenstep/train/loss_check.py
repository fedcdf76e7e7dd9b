"""Checks, before the first update, that the loss of each task is a sum over the units that its weight counts.

A micro-batch runs forward twice whole and once in two halves. Losses and weights of the halves must add up.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from evenstep.data import GlobalBatch, Microbatch
from evenstep.data.tree import copied, tensors_in
from evenstep.errors import LostRankError, TaskError
from evenstep.oom import give_back, is_out_of_memory
from evenstep.parallel.buffers import is_batch_norm
from evenstep.pipeline.compiled import as_written
from evenstep.train.cut import parts_of
from evenstep.train.forwards import evaluating, run_forwards
from evenstep.train.tasks.task import Loss, Task, weight_of
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import TrainContext
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.update import Update

_16_BITS = frozenset({torch.float16, torch.bfloat16})
_OFF = "`train=Training(check_loss=False)`"
_SURE = 0.2  # of the losses: a mean differs from the sum of its halves by more

# Largest difference that rounding makes: of the largest loss, and of each unit where terms cancel.
_WIDE = (1e-3, 1e-6)
_FAST = (1e-2, 1e-4)  # kernels of an accelerator may differ with the batch size
_NARROW = (5e-2, 1e-2)  # computed in 16 bits


class _Value(NamedTuple):
    """Summed loss and weight of a piece of a micro-batch, and the units that a `Loss.of_mean` counted."""

    loss: float
    weight: float
    mean_over: float | None


@final
class LossCheck:
    """Compares the loss of a micro-batch with the losses of its halves, once for each task.

    Attributes:
        pending: names of the tasks that are not checked yet.
        is_running: forwards of the check are run.
    """

    is_running = False

    def __init__(self, core: Update, context: TrainContext, execution: Execution, pending: set[str]) -> None:
        self.pending = pending
        self._core = core
        self._context = context
        self._execution = execution
        self._recovery = Recovery(execution=execution, context=context)

    def __call__(self, batch: GlobalBatch) -> None:
        """Check the pending tasks of a global batch; all ranks call it together.

        Raises:
            TaskError: on all ranks, for a loss or a weight that does not add up.
        """
        if not self.pending:
            return
        for name in dict.fromkeys(part.task for part in batch.parts) or [""]:
            if name not in self.pending:
                continue
            self.pending.discard(name)
            with self._context.phases.only("check"):
                fault = self._fault(name, [one for one in batch.microbatches if one.task == name])
            for theirs in self._execution.group.gather(fault):
                if theirs:
                    raise TaskError(f"task `{name}`: {theirs}" if name else theirs, field=name)

    def _fault(self, name: str, microbatches: Sequence[Microbatch]) -> str:
        task = self._context.tasks[name]
        pieces = self._cut(task, microbatches)
        if not any(self._execution.group.gather(bool(pieces))):
            return ""
        kept: list[Any] = []  # losses, and whether outputs were of 16 bits
        with ExitStack() as around:
            around.enter_context(self._core.rollback.unchanged())
            around.enter_context(evaluating(self._core.model, self._context.device, self._context.tasks.values()))
            around.callback(setattr, self, "is_running", False)
            self.is_running = True
            around.enter_context(as_written())
            # torch's shortcut for attention gives outputs as long as the longest sequence of a piece
            around.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            self._run(name, pieces, kept)
        if not pieces or len(kept) != len(pieces):
            return ""
        values = [_value(task, loss, piece) for (loss, _), piece in zip(kept, pieces, strict=True)]
        known = [value for value in values if value is not None and math.isfinite(value.loss)]
        is_narrow = any(narrow for _, narrow in kept)
        return self._compare(task, pieces[0].index, known, is_narrow) if len(known) == len(pieces) else ""

    def _cut(self, task: Task, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The first micro-batch that can be cut, twice, and its halves."""
        try:
            for one in microbatches:
                whole = self._context.cuts.pieces(task, one)[0]
                halves = parts_of(task, whole)
                if len(halves) > 1 and all(_weight(task, piece) > 0 for piece in (whole, *halves)):
                    return [whole, whole, *halves]
        except Exception:  # noqa: BLE001 - the update raises it again, where it is no matter of the check
            pass
        return []

    def _run(self, name: str, pieces: Sequence[Microbatch], kept: list[Any]) -> None:
        context, execution = self._context, self._execution
        together = execution.evaluates_together

        def passes() -> None:
            numbered = enumerate(pieces)
            work = tuple(replace(piece, index=n, part=(), data=copied(piece.data)) for n, piece in numbered)
            try:
                run_forwards(
                    execution,
                    context.silently(),
                    work,
                    lambda task, one, seen: kept.append(seen),
                    see=lambda task, output, batch: (task.loss(output, batch), _is_narrow(output)),
                    path=("check",),
                    kind=f"check {name}",
                )
            finally:
                for stage in execution.runner.stages.values():
                    stage.forget()
            if together:
                execution.group.gather(None)  # a rank that is done meets those that run out of memory later

        if together:
            self._recovery.once(f"the check of the loss of {name or 'the task'}", passes)
            return
        try:
            passes()
        except LostRankError:
            raise
        except Exception as error:  # noqa: BLE001 - likewise
            if is_out_of_memory(error):
                give_back()

    def _tolerance(self, is_narrow: bool) -> tuple[float, float]:
        formats = {parameter.dtype for parameter in self._core.model.parameters()}
        is_mixed = self._context.precision.name != "32-true"
        if is_narrow or is_mixed or not formats.isdisjoint(_16_BITS):
            return _NARROW
        # by the newer of torch's two names: the older one raises where the newer was set
        products: Any = torch.backends.mkldnn
        is_exact = self._context.device.type == "cpu" and products.matmul.fp32_precision in ("none", "ieee")
        return _WIDE if is_exact else _FAST

    def _compare(self, task: Task, number: int, values: Sequence[_Value], is_narrow: bool) -> str:
        relative, per_unit = self._tolerance(is_narrow)
        name = type(task).__name__
        whole, again, *halves = values
        is_random = abs(whole.loss - again.loss) > relative / 10 * max(abs(one.loss) for one in values)
        if is_random and task.late_weight:
            return ""
        weight = math.fsum(half.weight for half in halves)
        if not math.isclose(weight, whole.weight, rel_tol=1e-6):
            return (
                f"the weight of micro-batch {number} is {whole.weight:g}, but its parts weigh {weight:g} together. "
                f"`{name}.weight` must count the units of the summed loss, such as `(labels != -100).sum()`. If it is "
                f"meant so: {_OFF}."
            )
        norms = [part for part in self._core.model.modules() if is_batch_norm(part) and not part.track_running_stats]
        if not is_random and not norms and _differs(whole, halves, relative, per_unit):
            total = math.fsum(half.loss for half in halves)
            return (
                f"the loss of micro-batch {number} is {whole.loss:.4g}, but the losses of its parts add up to "
                f'{total:.4g}. `{name}.loss` must be the sum over its units: `reduction="sum"`, or `Loss.of_mean(mean, '
                f"count)`. If a loss of the whole micro-batch is meant: {_OFF}."
            )
        if whole.mean_over is not None and not task.late_weight and not math.isclose(whole.mean_over, whole.weight):
            return (
                f"the loss of micro-batch {number} is a mean over {whole.mean_over:g} units, but `{name}.weight` gives "
                f"{whole.weight:g}. Count the same units, or set `late_weight = True`."
            )
        return ""


def _differs(whole: _Value, parts: Sequence[_Value], relative: float, per_unit: float) -> bool:
    losses = [part.loss for part in parts]
    scale = max(map(abs, (whole.loss, *losses)))
    excess = abs(math.fsum(losses) - whole.loss)
    margin = relative * scale
    if excess <= margin:
        return False
    least, most = min(losses), max(losses)
    is_mean = least - margin <= whole.loss <= most + margin and least * most > 0 and excess > _SURE * scale
    return (is_mean and scale > 10 * per_unit) or excess > 100 * per_unit * max(whole.weight, 1.0)


def _is_narrow(output: Any) -> bool:
    return any(one.dtype in _16_BITS for one in tensors_in(output))


def _weight(task: Task, piece: Microbatch) -> float:
    return 1.0 if task.late_weight else weight_of(task, piece.data, "a part of a micro-batch", piece.known_samples)


def _value(task: Task, given: Any, piece: Microbatch) -> _Value | None:
    loss = given if isinstance(given, Loss) else Loss(given)
    total: Any = loss.sum
    if not (isinstance(total, Tensor) and total.ndim == 0 and total.is_floating_point()):
        return None
    late: Any = loss.count if loss.weight is None else loss.weight
    count = None if loss.count is None else float(loss.count)
    weight = _weight(task, piece) if not task.late_weight or late is None else float(late)
    return _Value(float(total.detach()), weight, count)
