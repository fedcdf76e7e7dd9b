"""Break, meet, redo: repeats the work that ranks do together after one of them has run out of memory."""

from collections.abc import Callable, Iterator, Sequence
from traceback import format_exception
from types import TracebackType
from typing import TypeVar, final

from evenstep.errors import LostRankError, OutOfMemoryError
from evenstep.events import Incident, Json
from evenstep.oom import give_back, is_out_of_memory
from evenstep.parallel.group import Interrupted
from evenstep.train.failures import Answer, FailurePolicy
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep

T = TypeVar("T")


@final
class Recovery:
    """Attempts at work that ranks do together.

    Args:
        context: its `cuts` become finer where a micro-batch does not fit.
        policy: for micro-batches that don't fit; None: they are cut.
        evaluation: its name, if the work is no update; each rank may attempt its own part of one.
    """

    def __init__(
        self,
        *,
        execution: Execution,
        context: TrainContext,
        policy: FailurePolicy | None = None,
        evaluation: str = "",
    ) -> None:
        self._execution = execution
        self._context = context
        self._policy = policy
        self._evaluation = evaluation
        self._is_joint = not evaluation or execution.evaluates_together
        self._step: MicrobatchStep | None = None

    def attempts(self, place: str, update: int, undo: Callable[[], None]) -> Iterator["Attempt"]:
        """Attempts at the same work, until one has succeeded on all ranks.

            for attempt in recovery.attempts(…):
                with attempt:
                    …

        Args:
            place: name of the work, by which ranks see that they do the same.
            update: number under which incidents are reported.
            undo: undoes on this rank a failed attempt.
        """
        group = self._execution.group
        number = group.begin_work() if self._is_joint else 0
        while True:
            attempt = Attempt(self)
            yield attempt
            if not attempt.has_failed:
                break
            reason = attempt.interruption or self._cut(place, update, attempt.traceback)
            self._step = None  # it holds the memory that must be freed
            if self._is_joint:
                if not attempt.interruption:
                    group.interrupt(reason)
                limits = self._meet(place, number, reason, self._context.cuts.limit, undo)
                self._context.cuts.limit = min((limit for limit in limits if limit is not None), default=None)
            else:
                undo()
                give_back()
        self._step = None

    def once(self, place: str, compute: Callable[[], T]) -> T | None:
        """Compute once on all ranks; gives None where a rank had no memory for it."""
        group = self._execution.group
        number = group.begin_work()
        attempt = Attempt(self)
        with attempt:
            return compute()
        reason = attempt.interruption or f"rank {group.rank} ran out of memory in {place}"
        if not attempt.interruption:
            group.interrupt(reason)
        self._meet(place, number, reason, None, lambda: None)
        return None

    def watch(self, step: MicrobatchStep) -> None:
        """Watch the micro-batches that run: the current one is cut if it does not fit."""
        self._step = step

    def interruption(self, error: BaseException) -> str | None:
        """The reason that another rank gave for an error; "" for lack of memory here; None for any other error."""
        if is_out_of_memory(error):
            return ""
        if not self._is_joint or not isinstance(error, RuntimeError | LostRankError):
            return None
        reason = self._execution.group.interrupted() or (str(error) if isinstance(error, Interrupted) else "")
        return reason.rstrip(".") or None

    def _meet(self, place: str, number: int, reason: str, value: T, undo: Callable[[], None]) -> Sequence[T]:
        self._execution.reset()
        undo()
        give_back()
        everybody = self._execution.group.meet((place, number, value))
        for rank, (theirs, count, _) in enumerate(everybody):
            if (theirs, count) != (place, number):
                raise LostRankError(
                    f"{reason}, in {place}, when rank {rank} was in {theirs}, which can't be undone. Go on from "
                    f"the last checkpoint, with smaller micro-batches."
                )
        return self._execution.of_my_pipeline([theirs for _, _, theirs in everybody])

    def _cut(self, place: str, update: int, traceback: str) -> str:
        step, cuts, rank = self._step, self._context.cuts, self._execution.group.rank
        if step is None or step.doing is None:
            raise OutOfMemoryError(
                f"rank {rank} ran out of memory in {place}, outside of any micro-batch. Make the micro-batches smaller "
                f"(`data.micro_batch_size`), and go on from the last checkpoint."
            )
        phase, number, piece = step.doing
        one = next(one for one in step.work if one.index == number)
        task = self._context.tasks[one.task]
        where = f"{'a dummy pass' if step.is_dummy else f'micro-batch {number}'} in update {update}"
        if self._evaluation:
            where = f"evaluation '{self._evaluation}'"
        message = f"rank {rank} ran out of memory in the {phase} of {piece.title} of {where}"
        can_be_cut = cuts.can_be_cut(task, piece)
        end = "is cut in two from now on, and computed again" if can_be_cut else "can't be cut any finer"
        details: dict[str, Json] = {"part": list(piece.path)}
        samples = () if step.is_dummy else tuple(one.samples)
        if self._evaluation:
            details = {"evaluation": self._evaluation}
            samples = ()
        incident = Incident(
            kind="out_of_memory",
            update=update,
            message=f"{message}; it {end}.",
            details={"phase": phase, **details},
            rank=rank,
            microbatch=None if step.is_dummy else number,
            stage=None if self._evaluation else 0,
            samples=samples,
            traceback=traceback,
        )
        self._context.report(incident)
        kept = update if self._evaluation else update - 1
        if self._policy is not None and self._policy(incident) is Answer.STOP:
            raise OutOfMemoryError(
                f"{message}. Make the micro-batches smaller, or let `failures.out_of_memory` be retry; the parameters "
                f"are those after update {kept}."
            )
        if cuts.finer(task, piece):
            return message
        raise OutOfMemoryError(
            f"{message}, and that can't be cut any finer. Say in `{type(task).__name__}.split` how it is cut, or "
            f"use shorter samples or fewer `parallel.blocks`. The parameters are those after update {kept}."
        )


@final
class Attempt:
    """One attempt, made inside a `with`, which lack of memory and interruptions by other ranks do not leave.

    Attributes:
        interruption: the reason of another rank; "" if this one has run out of memory.
        traceback: of the error, which itself would hold the memory that must be freed.
    """

    __slots__ = ("_recovery", "has_failed", "interruption", "traceback")

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self.has_failed = False
        self.interruption = ""
        self.traceback = ""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        interruption = None if error is None else self._recovery.interruption(error)
        if error is None or interruption is None:
            return False
        self.has_failed = True
        self.interruption = interruption
        self.traceback = "".join(format_exception(error))
        return True
