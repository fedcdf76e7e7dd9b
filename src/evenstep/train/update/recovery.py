"""Break, meet, redo: repeats what ranks compute together after one of them has run out of memory."""

from collections.abc import Callable, Iterator, Sequence
from traceback import format_exception
from types import TracebackType
from typing import TypeVar, final

from evenstep.errors import LostRankError, OutOfMemoryError
from evenstep.events import Incident, Json
from evenstep.oom import give_back, is_out_of_memory
from evenstep.parallel.group import Interrupted
from evenstep.train.cut import described
from evenstep.train.failures import Answer, FailurePolicy
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import MicrobatchStep

T = TypeVar("T")


@final
class Recovery:
    """Lets what ranks compute together be attempted until it is done.

    Args:
        context: the tasks, which say how their batches are cut, and how finely that is done on this rank: more so
            where one does not fit.
        on_out_of_memory: the policy for micro-batches that don't fit; None: they are cut.
        evaluation: the name of what is computed, if that is no update. Where ranks don't wait for each other in an
            evaluation, each does its own until it is done.
    """

    def __init__(
        self,
        *,
        execution: Execution,
        context: TrainContext,
        report: Callable[[Incident], None],
        on_out_of_memory: FailurePolicy | None = None,
        evaluation: str = "",
    ) -> None:
        self._execution, self._tasks, self._cuts = execution, context.tasks, context.cuts
        self._report, self._policy, self._evaluation = report, on_out_of_memory, evaluation
        self._together = not evaluation or execution.evaluates_together
        self._step: MicrobatchStep | None = None

    def attempts(self, place: str, update: int, discard: Callable[[], None]) -> Iterator["Attempt"]:
        """Attempts at something, each from the beginning, until one has succeeded on all ranks that make it.

            for attempt in recovery.attempts(…):
                with attempt:
                    …

        What is computed inside must leave nothing of an attempt that fails where that is not freed.

        Args:
            place: what and where, so that ranks can see that they mean the same.
            update: the number under which incidents are reported.
            discard: undoes what a failed attempt has left on this rank.
        """
        together = self._together
        number = self._execution.group.begin_work() if together else 0
        attempt = Attempt(self._broken_off, together)
        while True:
            yield attempt
            if attempt.broken_off is None:
                break
            reason = attempt.broken_off or self._cut(place, update, attempt.fault)
            self._step = None  # which holds what must be freed
            if together:
                if not attempt.broken_off:
                    self._execution.group.interrupt(reason)
                limits = self._meet(place, number, reason, self._cuts.limit, discard)
                self._cuts.limit = min((limit for limit in limits if limit is not None), default=None)
            else:
                if not self._evaluation:
                    self._execution.reset()
                discard()
                give_back()
        self._step = None

    def once(self, place: str, compute: Callable[[], T]) -> tuple[T | None, bool]:
        """Compute once on all ranks; gives None where one had no memory for it, and whether it was in this pipeline."""
        group = self._execution.group
        number = group.begin_work()
        attempt = Attempt(self._broken_off, True)
        with attempt:
            return compute(), False
        ran_out = not attempt.broken_off
        reason = attempt.broken_off or f"rank {group.rank} ran out of memory in {place}"
        if ran_out:
            group.interrupt(reason)
        return None, any(self._meet(place, number, reason, ran_out, lambda: None))

    def runs(self, step: MicrobatchStep) -> None:
        """Note which micro-batches run, within an attempt: what of the last ones did not fit is cut."""
        self._step = step

    def _broken_off(self, error: BaseException, together: bool) -> str | None:
        if is_out_of_memory(error):
            return ""
        if not together or not isinstance(error, RuntimeError | LostRankError):  # else one of the user's own
            return None
        reason = self._execution.group.interrupted() or (str(error) if isinstance(error, Interrupted) else "")
        return reason.rstrip(".") or None

    def _meet(self, place: str, number: int, reason: str, said: T, discard: Callable[[], None]) -> Sequence[T]:
        group = self._execution.group
        self._execution.reset()
        discard()
        give_back()
        everybody = group.meet((place, number, said))
        elsewhere = [
            (rank, where) for rank, (where, count, _) in enumerate(everybody) if (where, count) != (place, number)
        ]
        if elsewhere:
            rank, where = elsewhere[0]
            raise LostRankError(
                f"{reason}, in {place}, when rank {rank} was in {where}, which can't be undone. Go on from "
                f"the last checkpoint, with smaller micro-batches."
            )
        return self._execution.alike([theirs for _, _, theirs in everybody])

    def _cut(self, place: str, update: int, fault: str) -> str:
        step, rank = self._step, self._execution.group.rank
        if step is None or step.doing is None:
            raise OutOfMemoryError(
                f"rank {rank} ran out of memory in {place}, outside of any micro-batch, so that nothing can be "
                f"cut. Make the micro-batches smaller (`data.micro_batch_size`), and go on from the last checkpoint."
            )
        phase, number, piece = step.doing
        task = self._tasks[next(one.task for one in step.work if one.index == number)]
        where = f"evaluation '{self._evaluation}'"
        if not self._evaluation:
            where = f"{'a dummy pass' if step.is_dummy else f'micro-batch {number}'} in update {update}"
        message = f"rank {rank} ran out of memory in the {phase} of {described(piece)} of {where}"
        again = "the batch is evaluated again" if self._evaluation else "the update is done again"
        done = (
            f"is cut in two from now on, and {again}"
            if self._cuts.can_be_cut(task, piece)
            else "can't be cut any finer"
        )
        incident = self._incident(step, update, f"{message}; it {done}.", fault)
        self._report(incident)
        if self._policy is not None and self._policy(incident) is Answer.STOP:
            raise OutOfMemoryError(
                f"{message}. Make the micro-batches smaller, or let `failures.out_of_memory` be retry; the parameters "
                f"are those after update {update - 1}."
            )
        if self._cuts.finer(task, piece):
            return message
        advice = (
            f"The parameters are those after update {update}; evaluate smaller samples, or on a device with more "
            f"memory."
            if self._evaluation
            else f"Use a smaller model, shorter samples, a precision or optimizer that needs less memory, or a device "
            f"with more; if the batch holds several samples, `{type(task).__name__}.split` must say how it is cut."
            f"{self._cuts.why_whole(task, piece)}"
        )
        raise OutOfMemoryError(f"{message}, and that can't be cut any finer. {advice}")

    def _incident(self, step: MicrobatchStep, update: int, message: str, fault: str) -> Incident:
        assert step.doing is not None
        (phase, number, piece), of_update = step.doing, not self._evaluation
        details: dict[str, Json] = {"part": list(piece.path)} if of_update else {"evaluation": self._evaluation}
        samples = next(one.samples for one in step.work if one.index == number)
        return Incident(
            kind="out_of_memory",
            update=update,
            message=message,
            details={"phase": phase, **details},
            rank=self._execution.group.rank,
            microbatch=None if step.is_dummy else number,
            stage=0 if of_update else None,
            samples=tuple(samples) if of_update and not step.is_dummy else (),
            traceback=fault,
        )


@final
class Attempt:
    """One attempt, made inside a `with`, which an error that can be mended does not leave.

    Args:
        why: gives why an error has broken it off, or None where it is to be raised.
        together: whether other ranks make it as well.

    Attributes:
        broken_off: why another rank has broken it off; "" if this one has run out of memory; None: it has succeeded.
        fault: the traceback of the error that broke it off. The error itself would hold what must be freed.
    """

    __slots__ = ("_together", "_why", "broken_off", "fault")

    def __init__(self, why: Callable[[BaseException, bool], str | None], together: bool) -> None:
        self._why, self._together = why, together
        self.broken_off: str | None = None
        self.fault = ""

    def __enter__(self) -> None:
        self.broken_off, self.fault = None, ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or (broken_off := self._why(error, self._together)) is None:
            return False
        self.broken_off, self.fault = broken_off, "".join(format_exception(error))
        return True
