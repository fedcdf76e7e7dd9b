"""Finds out, before the first update, whether the loss is what it must be: a sum over the units that `weight` counts.

One micro-batch of each task is run forward whole and in halves, in evaluation mode and without gradients; the summed
losses, and the weights, of the halves must add up to the whole's. If they don't, the run ends with both numbers and the
change to make: else its gradients would be those of another loss for every cut. What is merely worth knowing
(BatchNorm, a metric given as a mean, batches that can't be cut) is said in one line. The first micro-batch of each task
that an update leaves out, since it weighs 0, is run too: its loss must be 0. After the first updates it finds out
whether the loss depends on attributes that they have changed. Nothing that it does leaves a trace, and it never ends a
run for lack of memory. How the numbers are told apart is in `additive`.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, cast, final

import torch
from torch import nn

from evenstep.data import GlobalBatch, Microbatch
from evenstep.data.split import num_samples, tensors_in
from evenstep.errors import TaskError, clause
from evenstep.train.checks.additive import (
    FAST,
    NARROW,
    WIDE,
    LossValue,
    LossValues,
    SecondLook,
    Tolerance,
    adds_up,
    kind_of,
    means_among,
    sums_among,
    unlike_among,
    weighs_whole,
)
from evenstep.train.checks.loss_faults import (
    batch_norms,
    by_frequency,
    frequency_note,
    hook_note,
    hooked,
    loss_fault,
    metric_note,
    norm_note,
    sum_note,
    unchecked_note,
    uncut_note,
    unlike_note,
    weight_fault,
    weightless_fault,
)
from evenstep.train.checks.loss_runner import SIXTEEN_BITS, LossRunner, weight_of_piece
from evenstep.train.memory.sub_batch import SubBatch, parts_of, reason_not_cut, splits_itself, whole_of
from evenstep.train.side_effects import evaluating, without_side_effects
from evenstep.train.tasks.now import checking_losses
from evenstep.train.tasks.task import Task
from evenstep.train.update.changed_attributes import ChangedAttribute, ChangedAttributes
from evenstep.train.update.weigh import Weights

TRIES = 8  # global batches in which a task's micro-batches are looked at, where none of them can be halved
REPEATS = 6  # of a suspect whole, to see how far random numbers move it: with 2 they seem not to, once in 40 times


class TrialBatch(NamedTuple):
    """A piece of a micro-batch, and its parts."""

    microbatch: Microbatch
    whole: SubBatch
    parts: list[SubBatch]


@final
@dataclass(slots=True, kw_only=True)
class Guard:
    """Compares losses with those of halves, once for each task.

    Args:
        run: takes pieces of a micro-batch of a task forward; its context learns of what can't be cut.
        attributes: what the first updates have changed of the plain attributes of modules and tasks.
        say: says a sentence to the person who started the run.
        pending: the tasks that are to be looked at; none where losses are not checked.
        weightless: those of which a micro-batch of weight 0 is, when the first one is left out of an update.
        evaluated: those that are to be looked at in an evaluation too, as they ask whether it is one.
        tries: in how many global batches each of them was looked at without a result.
    """

    run: LossRunner
    model: nn.Module
    attributes: ChangedAttributes
    say: Callable[[str], None]
    pending: set[str]
    weightless: set[str] = field(init=False)
    evaluated: set[str] = field(init=False)
    tries: Counter[tuple[str, bool]] = field(default_factory=Counter[tuple[str, bool]])
    _said: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.weightless, self.evaluated = set(self.pending), set(self.pending)

    @property
    def is_due(self) -> bool:
        """Whether there is something to look at."""
        return bool(self.pending or self.attributes.found)

    def __call__(self, batch: GlobalBatch, *, besides: Collection[str] = ()) -> float:
        """Look at the tasks of a global batch that were not looked at yet; all ranks call it together.

        Args:
            besides: tasks whose loss is not asked for.

        Returns:
            The seconds it took.

        Raises:
            TaskError: a loss that is no sum over the units that the weight counts.
        """
        training = self.model.training
        if not (self.is_due or (self.evaluated and not training)):
            return 0.0
        began = perf_counter()
        if self.attributes.found and training:
            self._look_at_attributes(batch)
        names = dict.fromkeys(part.task for part in batch.parts) or {"": None}
        is_cut = batch.num_microbatches > 1 and training
        found = ((norm_note, batch_norms), (hook_note, hooked), (frequency_note, by_frequency)) if is_cut else ()
        of_model = [note(those) for note, look in found if (those := look(self.model))]
        tasks = self.run.context.tasks
        for name in [one for one in names if one in tasks and one not in besides]:
            mine = [one for one in batch.microbatches if one.task == name]
            if name in self.pending:
                with self._without_trace():
                    notes = self._look(name, mine)
                self._tell([*notes, *([] if name in self.pending else of_model)])
            if name in self.evaluated and not training:
                self._look_as_evaluated(name, mine)
        return perf_counter() - began

    def _look_as_evaluated(self, name: str, microbatches: Sequence[Microbatch]) -> None:
        """Look at the loss of a task in an evaluation, where it may be another than in updates."""
        asks = self.run.context.tasks[name].now.asks_evaluating
        if not any(self.run.execution.group.gather(asks)):
            self.evaluated.discard(name)
            return
        with self._without_trace(as_trained=False):
            notes = self._look(name, microbatches, evaluated=True)
        self._tell(notes)

    def _tell(self, notes: Sequence[str]) -> None:
        """Say each sentence once."""
        for note in notes:
            about = note.partition(":")[0]
            if about not in self._said:
                self._said.add(about)
                self.say(note)

    def look_at_weightless(self, batch: GlobalBatch, weights: Weights) -> None:
        """Look at the loss of a micro-batch of weight 0, which is not run; all ranks call it together.

        Raises:
            TaskError: the loss is not 0, so that it would count only beside others in one micro-batch.
        """
        tasks, gather = self.run.context.tasks, self.run.execution.group.gather
        for name in [one for one in weights.weightless if one in self.weightless]:
            self.weightless.discard(name)
            one = next(
                (one for one in batch.microbatches if one.task == name and weights.each.get(one.index) == 0), None
            )
            with self._without_trace():
                pieces = [] if one is None else [whole_of(one)]
                values = self.run(name, one, pieces, "check of weight 0", may_raise=True)  # updates never ask for it
            fault = ""
            if one is not None and values.known:
                loss = values.known[0].loss
                if abs(loss) > self._tolerance(narrow=values.narrow).per_unit:
                    fault = weightless_fault(tasks[name], _described(one, whole_of(one)), loss)
            for theirs in gather(fault):
                if theirs:
                    raise TaskError(f"task `{name}`: {theirs}" if name else theirs)

    @contextmanager
    def _without_trace(self, *, as_trained: bool = True) -> Generator[None]:
        """Around forwards: they leave nothing behind; tasks that run `as_trained` are told that it is no evaluation.

        torch's shortcut for attention in evaluation mode is left out: its outputs are as long as a part needs.
        """
        tasks, enabled = self.run.context.tasks.values(), torch.backends.mha.get_fastpath_enabled()
        unchanged = without_side_effects([self.model, *tasks])
        told = checking_losses() if as_trained else nullcontext()
        with unchanged, evaluating(self.model, self.run.context.device, tasks), told:
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                yield
            finally:
                torch.backends.mha.set_fastpath_enabled(enabled)

    def _look_at_attributes(self, batch: GlobalBatch) -> None:
        """Find out whether losses depend on attributes that passes have changed: they do where another value gives
        another loss. All ranks call it together.
        """
        found, self.attributes.found = self.attributes.found, {}
        tasks, matter = self.run.context.tasks, set[str]()
        for name in [name for name in dict.fromkeys(part.task for part in batch.parts) or ("",) if name in tasks]:
            trial = self._whole(tasks[name], [one for one in batch.microbatches if one.task == name])
            now, again = self._loss_with(found, "", name, trial), self._loss_with(found, "", name, trial)
            for key in found:
                then = self._loss_with(found, key, name, trial)
                if abs(then - now) > 10 * abs(again - now):  # no, where one of them is not known
                    matter.add(key)
        everybody = self.run.execution.group.gather(matter)
        self.attributes.tell(sorted(set[str]().union(*everybody)), found)

    def _loss_with(
        self, found: Mapping[str, Sequence[ChangedAttribute]], before: str, name: str, trial: TrialBatch | None
    ) -> float:
        """The loss with attributes as passes have left them, but for `before`; NaN where it is not known."""
        with without_side_effects([self.model, *self.run.context.tasks.values()]), checking_losses():
            for key, changes in found.items():
                for change in changes:
                    change.put(change.before if key == before else change.after)
            values = self._tried(name, trial, "check of attributes")
        return values.known[0].loss if values.known else math.nan

    def _look(self, name: str, microbatches: Sequence[Microbatch], *, evaluated: bool = False) -> list[str]:
        """Look at one task; gives what is to be said."""
        pending, which = self.evaluated if evaluated else self.pending, (name, evaluated)
        task, gather = self.run.context.tasks[name], self.run.execution.group.gather
        trial, uncut = self._trial(task, microbatches)
        self.tries[which] += 1
        if self.tries[which] >= TRIES:
            pending.discard(name)
        trial, values = self._values(name, trial)
        if values.known and values.known[0].count is not None:
            better = self._more_telling(task, microbatches, trial)
        else:
            better = None
        if any(gather(better is not None)):
            trial, values = self._values(name, better or trial)
        given, tolerance = values.known, self._tolerance(narrow=values.narrow)
        suspect = bool(given) and not (
            adds_up(given[0], given[1:], tolerance) and (not task.late_weight or weighs_whole(given[0], given[1:]))
        )
        again = self._again(name, trial if suspect else None) if any(gather(suspect)) else None
        fault, note = self._judged(task, trial, given, again if suspect else None, tolerance)
        if self.tries[which] == 1 and not any(gather(trial is not None)) and any(gather(uncut != "")):
            fault = self._miscounted(name, microbatches if uncut else ())
        if values.error and values.done:
            uncut = f"its first part raised {values.error}"
            self.run.context.cuts.uncut.append((task, uncut))
        notes = [note] if note else [uncut_note(task, uncut)] if uncut and not given else []
        if values.error and not values.done and self.tries[which] > 1:  # an update has raised nothing since
            notes = [unchecked_note(task, values.error)]
        everybody = gather((fault, notes, bool(given)))
        if any(looked for _, _, looked in everybody):
            pending.discard(name)
        for fault, _, _ in everybody:
            if fault:
                fault = f"in evaluations: {fault}" if evaluated else fault
                raise TaskError(f"task `{name}`: {fault}" if name else fault)
        return next((theirs for _, theirs, _ in everybody if theirs), [])

    def _trial(self, task: Task, microbatches: Sequence[Microbatch]) -> tuple[TrialBatch | None, str]:
        """The first micro-batch that has work in all its parts; or None, and why the engine can't cut any."""
        why = ""
        try:
            for one in microbatches:
                whole = self.run.context.cuts.pieces(task, whole_of(one))[0]
                why = why or reason_not_cut(task, whole)
                try:
                    parts = parts_of(task, whole)
                except Exception as error:  # noqa: BLE001 - said as a remark; nothing else has called it yet
                    return None, f"`split` raised {clause(error)}"
                if len(parts) > 1 and all(weight_of_piece(task, piece) > 0 for piece in (whole, *parts)):
                    return TrialBatch(one, whole, parts), ""
        except Exception:  # noqa: BLE001 - the update asks the same of the task, and says what it raises
            return None, ""
        return None, why

    def _values(self, name: str, trial: TrialBatch | None) -> tuple[TrialBatch | None, LossValues]:
        """What a task gives for a trial, or for a part of it that fits into memory."""
        task, values = self.run.context.tasks[name], LossValues()
        if any(self.run.execution.group.gather(trial is not None)):
            values = self._tried(name, trial)
            while values.out_of_memory_anywhere:
                trial = _smaller(task, trial) if values.out_of_memory else trial
                values = self._tried(name, trial)
        return trial, values

    def _tried(self, name: str, trial: TrialBatch | None, path: str = "check") -> LossValues:
        """What a task gives for a trial, the whole and then its parts; None where only other ranks have one."""
        if trial is None:
            return self.run(name, None, [], path)
        return self.run(name, trial.microbatch, [trial.whole, *trial.parts], path)

    def _more_telling(
        self, task: Task, microbatches: Sequence[Microbatch], trial: TrialBatch | None
    ) -> TrialBatch | None:
        """Another, where the parts of one have the same classes: then a mean over class weights is one over samples."""
        best, most = None, 0 if trial is None else _unlike(trial.parts)
        for one in microbatches:
            other, _ = self._trial(task, [one])
            if other is not None and _unlike(other.parts) > most:
                best, most = other, _unlike(other.parts)
        return best

    def _miscounted(self, name: str, microbatches: Sequence[Microbatch]) -> str:
        """What is wrong with the weight of a micro-batch that can't be cut, where its loss says what it has counted."""
        task = self.run.context.tasks[name]
        if task.late_weight or self.run.execution.evaluates_together:  # there an error would end the run
            return ""
        trial = self._whole(task, microbatches)
        given = self._tried(name, trial).known
        if trial is None or not given:
            return ""
        return weight_fault(task, _described(trial.microbatch, trial.whole), given[0], given)

    def _whole(self, task: Task, microbatches: Sequence[Microbatch]) -> TrialBatch | None:
        """The first micro-batch that has work, uncut."""
        try:
            for one in microbatches:
                whole = self.run.context.cuts.pieces(task, whole_of(one))[0]
                if weight_of_piece(task, whole) > 0:
                    return TrialBatch(one, whole, [])
        except Exception:  # noqa: BLE001 - the update asks the same of the task, and says what it raises
            pass
        return None

    def _tolerance(self, *, narrow: bool) -> Tolerance:
        """How exactly losses can be compared, of which some are `narrow`."""
        context, gathers = self.run.context, self.run.execution.reducers.gather_dtype
        formats = {parameter.dtype for parameter in self.model.parameters()}
        if narrow or gathers or context.precision.name != "32-true" or not formats.isdisjoint(SIXTEEN_BITS):
            return NARROW
        # asked by the newer of torch's two names, as the older one raises where this was set by the newer
        products = cast("Any", torch.backends.mkldnn).matmul
        return WIDE if context.device.type == "cpu" and products.fp32_precision in ("none", "ieee") else FAST

    def _again(self, name: str, trial: TrialBatch | None) -> SecondLook | None:
        """Look a second time, with other random numbers, at a whole and at the parts of its parts."""
        task, deeper = self.run.context.tasks[name], list[list[SubBatch]]()
        pieces: list[SubBatch] = []
        if trial is not None:
            for part in trial.parts:
                theirs = parts_of(task, part)
                useful = len(theirs) > 1 and all(weight_of_piece(task, one) > 0 for one in theirs)
                deeper.append(theirs if useful else [])
            pieces = [*[trial.whole] * REPEATS, *(one for theirs in deeper for one in theirs)]
        given = self.run(name, None if trial is None else trial.microbatch, pieces, "check again").known
        if not given:
            return None
        losses = iter([one.loss for one in given])
        return SecondLook(
            whole=[next(losses) for _ in range(REPEATS)], parts=[[next(losses) for _ in theirs] for theirs in deeper]
        )

    def _judged(
        self,
        task: Task,
        trial: TrialBatch | None,
        given: Sequence[LossValue],
        again: SecondLook | None,
        tolerance: Tolerance,
    ) -> tuple[str, str]:
        """What is wrong, and what else is to be said."""
        if trial is None or not given:
            return "", ""
        whole, parts, where = given[0], given[1:], _described(trial.microbatch, trial.whole)
        if again is not None and adds_up(whole, parts, tolerance):
            if again.is_random:  # so is what comes with it, the weight
                return "", ""
        elif again is not None:
            kind, size = kind_of(whole, parts, again, tolerance)
            norms = batch_norms(self.model, always=True)
            if kind == "whole" and norms:
                return "", norm_note(norms)
            if kind is not None:
                columns = _of_columns(task, trial) if kind == "whole" else ""
                return loss_fault(kind, size, task, where, whole, parts) + columns, ""
            if task.late_weight:  # random as the loss is
                return "", ""
        fault = weight_fault(task, where, whole, parts)
        means, sums = means_among(whole, parts), sums_among(whole, parts)
        note = metric_note(task, means) if means else sum_note(task, sums) if sums else ""
        if not note and (names := unlike_among(whole, parts, tolerance)):
            note = unlike_note(task, names, whole, parts)
        return fault, note


def _unlike(parts: Sequence[SubBatch]) -> int:
    """How many columns of whole numbers, such as labels, have other shares of them in some parts than in others."""
    columns = [*zip(*(_shares(part) for part in parts), strict=False)]
    return sum(any(one != theirs[0] for one in theirs) for theirs in columns)


def _shares(part: SubBatch) -> list[dict[int, float]]:
    """Of each column of whole numbers, the share of each."""
    found = [one for one in tensors_in(part.data) if not (one.is_meta or one.is_floating_point() or one.is_complex())]
    plain = [one for one in found if one.layout is torch.strided and one.numel()]
    counted = [(one.unique(return_counts=True), one.numel()) for one in plain]
    return [dict(zip(values.tolist(), (counts / size).tolist(), strict=True)) for (values, counts), size in counted]


def _of_columns(task: Task, trial: TrialBatch) -> str:
    """What is to be added to a fault where halves may have been cut across samples: as many rows as columns."""
    count = num_samples(trial.whole.data, trial.whole.num_samples)
    shapes = [list(one.shape) for one in tensors_in(trial.whole.data)]
    square = next((shape for shape in shapes if count in shape[1:2] and shape[0] == count), None)
    if square is None or splits_itself(task):
        return ""
    return f" If samples are the columns of the tensor {square}, which was cut by rows: say so in `split` and `weight`."


def _smaller(task: Task, trial: TrialBatch | None) -> TrialBatch | None:
    """The first part of what did not fit; None where it can't be cut any finer."""
    if trial is None:
        return None
    whole = trial.parts[0]
    parts = parts_of(task, whole)
    return TrialBatch(trial.microbatch, whole, parts) if len(parts) > 1 else None


def _described(microbatch: Microbatch, whole: SubBatch) -> str:
    number = microbatch.index
    count = num_samples(whole.data, whole.num_samples)
    samples = "" if count is None else f" ({count} samples)"
    return f"micro-batch {number}{samples}" if not whole.path else f"a part of micro-batch {number}{samples}"
