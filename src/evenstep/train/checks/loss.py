"""Finds out, before the first update, whether the loss is what it must be: a sum over the units that `weight` counts.

One micro-batch of each task is run forward whole and in halves, in evaluation mode and without gradients; the summed
losses, and the weights, of the halves must add up to the whole's. If they don't, the run ends with both numbers and the
change to make: else its gradients would be those of another loss for every cut. What is merely worth knowing
(BatchNorm, a metric given as a mean, batches that can't be cut) is said in one line. Nothing that it does leaves a
trace, and it never ends a run for lack of memory. How the numbers are told apart is in `additive`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import said
from evenstep.data import GlobalBatch, Microbatch
from evenstep.errors import TaskError, clause
from evenstep.memory import give_back, is_out_of_memory
from evenstep.train.checks.additive import FAST, NARROW, WIDE, Again, Given, Precise, adds_up, kind_of, means_among
from evenstep.train.checks.loss_faults import batch_norms, loss_fault, metric_note, norm_note, uncut_note, weight_fault
from evenstep.train.context import TrainContext
from evenstep.train.execution import Execution
from evenstep.train.memory.split import copied, num_samples, tensors_in
from evenstep.train.memory.split_limit import SplitLimit
from evenstep.train.memory.sub_batch import SubBatch, part_of, parts_of, reason_not_cut
from evenstep.train.microbatch import MicrobatchStep
from evenstep.train.recovery import Recovery
from evenstep.train.tasks.metrics import is_number
from evenstep.train.tasks.onlooker import Onlooker
from evenstep.train.tasks.task import Loss, Task
from evenstep.train.untouched import evaluating, untouched
from evenstep.train.weigh import Weights, weight_of

TRIES = 8  # global batches in which a task's micro-batches are looked at, where none of them can be halved
REPEATS = 6  # of a suspect whole, to see how far random numbers move it: with 2 they seem not to, once in 40 times
WHILE_LOOKING = (
    "It was raised while the loss of a micro-batch was compared with those of its halves, as `Task.split` cuts it; "
    "`train=Training(check_loss=False)`, in a run file `train.check_loss = false`, leaves that out."
)
_16_BITS = frozenset({torch.float16, torch.bfloat16})


class Trial(NamedTuple):
    """A piece of a micro-batch, and its parts."""

    microbatch: Microbatch
    whole: SubBatch
    parts: list[SubBatch]


class Heard(NamedTuple):
    """What came of a round.

    Args:
        given: by the task for each batch, on the ranks that share it; None for one without a loss to compare.
        narrow: whether some of it was computed in 16 bits.
        no_memory: whether there was no memory for it here.
        nor_elsewhere: whether a rank had none.
        done: how many batches were run before something was raised.
        error: what was raised, where the run can go on.
    """

    given: Sequence[Given | None] = ()
    narrow: bool = False
    no_memory: bool = False
    nor_elsewhere: bool = False
    done: int = 0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether there is something to compare."""
        return bool(self.given) and all(one is not None and one.is_finite for one in self.given)


@final
@dataclass(slots=True, kw_only=True)
class Guard:
    """Compares losses with those of halves, once for each task.

    Args:
        context: tasks, precision and device.
        execution: how forwards are run, and on which ranks.
        cuts: how finely micro-batches must be cut to fit into memory; learns of what can't be cut.
        say: says a sentence to the person who started the run.
        pending: the tasks that are to be looked at; none where losses are not checked.
        tries: in how many global batches each of them was looked at without a result.
    """

    model: nn.Module
    context: TrainContext
    execution: Execution
    cuts: SplitLimit
    say: Callable[[str], None]
    pending: set[str]
    tries: dict[str, int] = field(default_factory=dict[str, int])
    _said: set[str] = field(default_factory=set[str])
    _recovery: Recovery = field(init=False)

    def __post_init__(self) -> None:
        self._recovery = Recovery(
            execution=self.execution, tasks=self.context.tasks, cuts=self.cuts, report=lambda incident: None
        )

    def __call__(self, batch: GlobalBatch) -> float:
        """Look at the tasks of a global batch that were not looked at yet; all ranks call it together.

        Args:
            batch: that is about to be run.

        Returns:
            The seconds it took.

        Raises:
            TaskError: a loss that is no sum over the units that the weight counts.
        """
        if not self.pending:
            return 0.0
        began = perf_counter()
        names = dict.fromkeys(part.task for part in batch.parts) or {"": None}
        norms = batch_norms(self.model) if batch.num_microbatches > 1 and self.model.training else []
        for name in [name for name in names if name in self.pending and name in self.context.tasks]:
            owners = [self.model, *self.context.tasks.values()]
            with untouched(owners), evaluating(self.model, self.context.device), _as_in_training():
                notes = self._look(name, [one for one in batch.microbatches if one.task == name])
            for note in [*notes, *([norm_note(norms)] if norms and name not in self.pending else [])]:
                about = note.partition(":")[0]
                if about not in self._said:
                    self._said.add(about)
                    self.say(note)
        return perf_counter() - began

    def _look(self, name: str, microbatches: Sequence[Microbatch]) -> list[str]:
        """Look at one task; gives what is to be said."""
        task, gather = self.context.tasks[name], self.execution.group.gather
        trial, uncut = self._trial(task, microbatches)
        self.tries[name] = self.tries.get(name, 0) + 1
        if self.tries[name] >= TRIES:
            self.pending.discard(name)
        heard = Heard()
        if any(gather(trial is not None)):
            heard = self._run(name, trial, _whole_and_parts(trial), "check")
            while heard.nor_elsewhere:
                trial = _smaller(task, trial) if heard.no_memory else trial
                heard = self._run(name, trial, _whole_and_parts(trial), "check")
        given = [one for one in heard.given if one is not None] if heard.is_whole else []
        precise = self._precise(narrow=heard.narrow)
        suspect = bool(given) and not adds_up(given[0], given[1:], precise)
        again = self._again(name, trial if suspect else None) if any(gather(suspect)) else None
        fault, note = self._judged(task, trial, given, again if suspect else None, precise)
        if heard.error and heard.done:
            uncut = f"its first part raised {heard.error}"
            self.cuts.uncut.append((task, uncut))
        notes = [note] if note else [uncut_note(task, uncut)] if uncut and not given else []
        everybody = gather((fault, notes, bool(given)))
        if any(looked for _, _, looked in everybody):
            self.pending.discard(name)
        for fault, _, _ in everybody:
            if fault:
                raise TaskError(f"task `{name}`: {fault}" if name else fault)
        return next((theirs for _, theirs, _ in everybody if theirs), [])

    def _trial(self, task: Task, microbatches: Sequence[Microbatch]) -> tuple[Trial | None, str]:
        """The first micro-batch that has work in all its parts; or None, and why the engine can't cut any."""
        why = ""
        try:
            for one in microbatches:
                whole = self.cuts.pieces(task, one.data, one.known_samples)[0]
                why = why or reason_not_cut(task, whole)
                try:
                    parts = parts_of(task, whole)
                except Exception as error:  # noqa: BLE001 - said as a remark; nothing else has called it yet
                    return None, f"`split` raised {clause(error)}"
                if len(parts) > 1 and all(self._weight(task, piece) > 0 for piece in (whole, *parts)):
                    return Trial(one, whole, parts), ""
        except Exception:  # noqa: BLE001 - the update asks the same of the task, and says what it raises
            return None, ""
        return None, why

    def _weight(self, task: Task, piece: SubBatch) -> float:
        return 1.0 if task.late_weight else weight_of(task, piece.data, "a part of a micro-batch", piece.num_samples)

    def _precise(self, *, narrow: bool) -> Precise:
        """How exactly losses can be compared, of which some are `narrow`."""
        gathers = self.execution.reducers.gather_dtype
        formats = {parameter.dtype for parameter in self.model.parameters()}
        if narrow or gathers or self.context.precision.name != "32-true" or not formats.isdisjoint(_16_BITS):
            return NARROW
        return WIDE if self.context.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest" else FAST

    def _again(self, name: str, trial: Trial | None) -> Again | None:
        """Look a second time, with other random numbers, at a whole and at the parts of its parts."""
        task, deeper = self.context.tasks[name], list[list[SubBatch]]()
        pieces: list[SubBatch] = []
        if trial is not None:
            for part in trial.parts:
                theirs = parts_of(task, part)
                useful = len(theirs) > 1 and all(self._weight(task, one) > 0 for one in theirs)
                deeper.append(theirs if useful else [])
            pieces = [*[trial.whole] * REPEATS, *(one for theirs in deeper for one in theirs)]
        heard = self._run(name, trial, pieces, "check again")
        if not heard.is_whole:
            return None
        losses = iter([one.loss for one in heard.given if one is not None])
        return Again(
            whole=[next(losses) for _ in range(REPEATS)], parts=[[next(losses) for _ in theirs] for theirs in deeper]
        )

    def _judged(
        self, task: Task, trial: Trial | None, given: Sequence[Given], again: Again | None, precise: Precise
    ) -> tuple[str, str]:
        """What is wrong, and what else is to be said."""
        if trial is None or not given:
            return "", ""
        whole, parts, where = given[0], given[1:], _described(trial)
        if again is not None:
            kind, size = kind_of(whole, parts, again, precise)
            norms = batch_norms(self.model, always=True)
            if kind == "whole" and norms:
                return "", norm_note(norms)
            if kind is not None:
                return loss_fault(kind, size, task, where, whole, parts), ""
            if task.late_weight:  # random as the loss is
                return "", ""
        fault = weight_fault(task, where, whole, parts)
        means = means_among(whole, parts)
        return fault, metric_note(task, means) if means else ""

    def _run(self, name: str, trial: Trial | None, pieces: Sequence[SubBatch], path: str) -> Heard:
        """Run pieces of a micro-batch forward; all ranks call it together, also those without any."""
        if not self.execution.evaluates_together:
            return self._heard(name, trial, pieces, path)
        compute = partial(self._heard, name, trial, pieces, path)
        heard, no_memory = self._recovery.once(f"the check of the loss of {name or 'the task'}", compute)
        return Heard(no_memory=no_memory, nor_elsewhere=True) if heard is None else heard

    def _heard(self, name: str, trial: Trial | None, pieces: Sequence[SubBatch], path: str) -> Heard:
        """Run them once."""
        task, execution = self.context.tasks[name], self.execution
        work: tuple[Microbatch, ...] = ()
        if trial is not None:
            work = tuple(
                replace(part_of(trial.microbatch, piece), index=number, data=copied(piece.data))
                for number, piece in enumerate(pieces)
            )
        listening = _Listening(task)
        heard = self._passed(name, work, listening, path)
        given: list[Given | None] = []
        if execution.holds_output and not heard.no_memory and not heard.error:
            weights = [self._weight(task, piece) for piece in pieces]
            given = [_given(task, loss, weight) for loss, weight in zip(listening.heard, weights, strict=True)]
        place, holds = execution.reducers.rank, execution.holds_output
        everybody = execution.group.gather((place, holds, given, listening.narrow, heard.no_memory))
        given, narrow = next((theirs, narrow) for rank, has, theirs, narrow, _ in everybody if has and rank == place)
        elsewhere = any(no_memory for *_, no_memory in everybody)
        return heard._replace(given=given, narrow=narrow, nor_elsewhere=elsewhere, done=len(listening.heard))

    def _passed(self, name: str, work: tuple[Microbatch, ...], listening: "_Listening", path: str) -> Heard:
        """Take micro-batches through the model, without hooks and records."""
        execution = self.execution
        each = {one.index: 1.0 for one in work}
        weights = Weights(
            totals={name: 1.0}, num_microbatches=len(work), each=each, divisors={}, work=work, num_tasks=1
        )
        dummy = partial(MicrobatchStep.dummy, self._silent(name, _Listening(self.context.tasks[name])))
        execution.pad_passes(work, dummy, backward=False, kind=f"check {name}")
        context, heard = self._silent(name, listening), Heard()
        try:
            with MicrobatchStep(
                context, weights, path=(path,), update=0, factor=1.0, prefix="", cuts=SplitLimit()
            ) as step:
                execution.evaluator.run(execution.forwards(step.lay_out(work)), step)
        except Exception as error:
            no_memory = is_out_of_memory(error)
            if execution.evaluates_together:  # what one rank does not run, others wait for
                if not no_memory:
                    error.add_note(WHILE_LOOKING)
                raise
            # what else is raised the update will raise as well, and say it
            heard = Heard(no_memory=no_memory, error="" if no_memory else clause(error))
        if heard.no_memory:
            give_back()
        return heard

    def _silent(self, name: str, listening: "_Listening") -> TrainContext:
        return replace(self.context.silently(), tasks={name: listening}, poison=None)


@final
class _Listening(Onlooker):
    """Another task; what its loss gives is kept."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.heard: list[Any] = []
        self.narrow = False

    def look(self, output: Any, batch: Any) -> None:
        self.narrow = self.narrow or any(one.dtype in _16_BITS for one in tensors_in(output))
        self.heard.append(self._task.loss(output, batch))


def _given(task: Task, loss: Any, weight: float) -> Given | None:
    """What a task gave for a batch, as numbers; None where that is not a loss."""
    loss = loss if isinstance(loss, Loss) else Loss(loss)
    total: Any = loss.sum
    if not (isinstance(total, Tensor) and total.ndim == 0 and total.is_floating_point()):
        return None  # also where there is none: which batches have one is the task's to say
    late: Any = loss.count if loss.weight is None else loss.weight
    return Given(
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


@contextmanager
def _as_in_training() -> Generator[None]:
    """Leave out torch's own shortcut for attention in evaluation mode: its outputs are as long as a part needs."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _whole_and_parts(trial: Trial | None) -> list[SubBatch]:
    return [] if trial is None else [trial.whole, *trial.parts]


def _smaller(task: Task, trial: Trial | None) -> Trial | None:
    """The first part of what did not fit; None where it can't be cut any finer."""
    if trial is None:
        return None
    whole = trial.parts[0]
    parts = parts_of(task, whole)
    return Trial(trial.microbatch, whole, parts) if len(parts) > 1 else None


def _described(trial: Trial) -> str:
    number, whole = trial.microbatch.index, trial.whole
    count = num_samples(whole.data, whole.num_samples)
    samples = "" if count is None else f" ({count} samples)"
    return f"micro-batch {number}{samples}" if not whole.path else f"a part of micro-batch {number}{samples}"
