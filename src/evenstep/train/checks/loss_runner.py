"""Runs pieces of a micro-batch forward, and gives what the task says of each: its summed loss, weight and metrics.

It runs without hooks, records and gradients (but for losses that take derivatives themselves), and it says what went
wrong as a value where the run can go on. What the numbers must be to each other is for `loss`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor

from evenstep.arguments import said
from evenstep.data import Microbatch
from evenstep.data.split import copied, tensors_in
from evenstep.errors import LostRankError, TaskError, clause
from evenstep.memory import give_back, is_out_of_memory
from evenstep.train.checks.additive import LossValue, LossValues
from evenstep.train.memory.sub_batch import SubBatch, part_of
from evenstep.train.tasks.derivatives import takes_derivatives
from evenstep.train.tasks.metrics import is_number
from evenstep.train.tasks.observed import ObservedTask
from evenstep.train.tasks.task import Loss, Task, weight_of
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.recovery import Recovery
from evenstep.train.update.weigh import Weights

SIXTEEN_BITS = frozenset({torch.float16, torch.bfloat16})
WHILE_LOOKING = (
    "It was raised while the loss of a micro-batch was compared with those of its halves, as `Task.split` cuts it: "
    "override that where it parts what belongs together, such as tokens and their offsets. "
    "`train=Training(check_loss=False)`, in a run file `train.check_loss = false`, leaves the comparison out."
)


@final
@dataclass(slots=True, kw_only=True)
class LossRunner:
    """Runs pieces of micro-batches forward."""

    context: TrainContext
    execution: Execution
    _recovery: Recovery = field(init=False)

    def __post_init__(self) -> None:
        self._recovery = Recovery(execution=self.execution, context=self.context, report=lambda incident: None)

    def __call__(
        self,
        name: str,
        microbatch: Microbatch | None,
        pieces: Sequence[SubBatch],
        path: str,
        *,
        may_raise: bool = False,
    ) -> LossValues:
        """Run pieces of a micro-batch forward; all ranks call it together, also those without any.

        Args:
            may_raise: whether the loss of a piece may raise: then it gives nothing.
        """
        together = self.execution.evaluates_together  # else what is raised ends nothing: its words are kept
        recorder = _LossRecorder(self.context.tasks[name], may_raise=may_raise and together)
        once = partial(self._once, name, microbatch, pieces, path, recorder)
        if not together:
            return once()
        values, out_of_memory = self._recovery.once(f"the check of the loss of {name or 'the task'}", once)
        return LossValues(out_of_memory=out_of_memory, out_of_memory_anywhere=True) if values is None else values

    def _once(
        self,
        name: str,
        microbatch: Microbatch | None,
        pieces: Sequence[SubBatch],
        path: str,
        recorder: "_LossRecorder",
    ) -> LossValues:
        """Run them once."""
        task, execution = self.context.tasks[name], self.execution
        work: tuple[Microbatch, ...] = ()
        if microbatch is not None:
            work = tuple(
                replace(part_of(microbatch, piece), index=number, data=copied(piece.data))
                for number, piece in enumerate(pieces)
            )
        with self.context.teaching(name):
            values = self._passed(name, work, recorder, path)
        given: list[LossValue | None] = []
        if execution.holds_output and not values.out_of_memory and not values.error:
            weights = [weight_of_piece(task, piece) for piece in pieces]
            given = [_given(task, loss, weight) for loss, weight in zip(recorder.losses, weights, strict=True)]
        place, holds = execution.reducers.rank, execution.holds_output
        everybody = execution.group.gather((place, holds, given, recorder.narrow, values.out_of_memory))
        given, narrow = next((theirs, narrow) for rank, has, theirs, narrow, _ in everybody if has and rank == place)
        elsewhere = any(out_of_memory for *_, out_of_memory in everybody)
        return values._replace(given=given, narrow=narrow, out_of_memory_anywhere=elsewhere, done=len(recorder.losses))

    def _passed(
        self, name: str, work: tuple[Microbatch, ...], recorder: "_LossRecorder", path: str, *, derives: bool = False
    ) -> LossValues:
        """Take micro-batches through the model, without hooks and records.

        Args:
            derives: whether the loss is known to take derivatives itself, so that it can't be had without a graph.
        """
        execution = self.execution
        weights = Weights.of_forwards(name, work, num_microbatches=len(work))
        dummy = partial(MicrobatchStep.dummy, self._silent(name, _LossRecorder(self.context.tasks[name])))
        with torch.set_grad_enabled(derives):  # as what others run meanwhile
            execution.pad_passes(work, dummy, backward=False, kind=f"check {name}")
        context, values = self._silent(name, recorder), LossValues()
        try:
            with torch.set_grad_enabled(derives), MicrobatchStep(context, weights, path=(path,)) as step:
                execution.evaluator.run(execution.forwards(step.lay_out(work)), step)
        except Exception as error:
            out_of_memory = is_out_of_memory(error)
            if takes_derivatives(error) and not derives and not execution.evaluates_together:
                recorder.losses.clear()
                return self._passed(name, work, recorder, path, derives=True)
            if execution.evaluates_together:  # what one rank does not run, others wait for
                if not out_of_memory and not isinstance(error, LostRankError):
                    error.add_note(WHILE_LOOKING)
                raise
            # what else is raised the update will raise as well, and say it
            values = LossValues(out_of_memory=out_of_memory, error="" if out_of_memory else clause(error))
        finally:
            for stage in execution.evaluator.stages.values():
                stage.forget()  # nobody goes back
        if values.out_of_memory:
            give_back()
        return values

    def _silent(self, name: str, recorder: "_LossRecorder") -> TrainContext:
        return replace(self.context.silently(), tasks={name: recorder}, poison=None)


@final
class _LossRecorder(ObservedTask):
    """Another task; what its loss gives is kept."""

    def __init__(self, task: Task, *, may_raise: bool = False) -> None:
        super().__init__(task)
        self._may_raise = may_raise
        self.losses: list[Any] = []
        self.narrow = False

    def observe(self, output: Any, batch: Any) -> None:
        self.narrow = self.narrow or any(one.dtype in SIXTEEN_BITS for one in tensors_in(output))
        try:
            self.losses.append(_without_graph(self._task.loss(output, batch)))
        except Exception as error:
            if not self._may_raise or is_out_of_memory(error):
                raise
            self.losses.append(None)

    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch).requires_grad_(torch.is_grad_enabled())


def weight_of_piece(task: Task, piece: SubBatch) -> float:
    """The weight of a piece; 1 where it comes with the loss."""
    return 1.0 if task.late_weight else weight_of(task, piece.data, "a part of a micro-batch", piece.num_samples)


def _without_graph(loss: Any) -> Any:
    """What a task gave, without what could be gone back through."""
    if isinstance(loss, Loss) and isinstance(loss.sum, Tensor):
        return replace(loss, sum=loss.sum.detach())
    return loss.detach() if isinstance(loss, Tensor) else loss


def _given(task: Task, loss: Any, weight: float) -> LossValue | None:
    """What a task gave for a batch, as numbers; None where that is not a loss."""
    loss = loss if isinstance(loss, Loss) else Loss(loss)
    total: Any = loss.sum
    if not (isinstance(total, Tensor) and total.ndim == 0 and total.is_floating_point() and not total.is_meta):
        return None  # also where there is none: which batches have one is the task's to say
    late: Any = loss.count if loss.weight is None else loss.weight
    return LossValue(
        loss=float(total),
        weight=_count_of(task, late) if task.late_weight and late is not None else weight,
        count=None if loss.count is None else _count_of(task, loss.count),
        metrics=_numbers(loss.metrics),
    )


def _count_of(task: Task, given: object) -> float:
    if not is_number(given) or (isinstance(given, Tensor) and given.numel() != 1):
        raise TaskError(
            f"the weight or `count` of a `Loss` of {type(task).__name__} must be a number, but is {said(given)}."
        )
    return float(cast("Any", given))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """The metrics that are pairs of numbers; what else they are the update says."""
    found: dict[str, tuple[float, float]] = {}
    for name, pair in metrics.items() if isinstance(cast("object", metrics), Mapping) else ():
        try:
            total, weight = pair
            found[name] = float(total), float(weight)
        except (TypeError, ValueError, RuntimeError):
            continue
    return found
