"""Break, meet, redo: how ranks go on together when one of them can't.

What ranks compute together leaves nothing behind until it is applied. So a rank that runs out of memory in it says
what did not fit, cuts it finer from now on, and breaks the connections of all; that wakes whoever waits. All let go of
what they have, meet in new connections, agree that they are at the same place and how finely each must cut, and do the
same once more. What can't be mended is raised, and the others learn of it as of any rank that fails. Stages, reducers
and steps know nothing of this; one process does the same, and meets nobody.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, final

from evenstep.data import Microbatch
from evenstep.errors import LostRankError, OutOfMemoryError
from evenstep.events import Incident, Json
from evenstep.memory import give_back, is_out_of_memory
from evenstep.train.execution import Execution
from evenstep.train.failures import Answer, FailurePolicy
from evenstep.train.microbatch import MicrobatchStep
from evenstep.train.split_limit import SplitLimit, SubBatch, described
from evenstep.train.task import Task

T = TypeVar("T")


@final
@dataclass(slots=True)
class Attempt:
    """One try of what ranks compute together.

    Args:
        step: the micro-batches that run, or ran when the try failed.
        is_dummy: whether they count nowhere, and run only because those of other ranks do.
    """

    step: MicrobatchStep | None = None
    is_dummy: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What ranks compute together, in words.

    Args:
        place: what and where, so that ranks can see that they mean the same.
        update: the number under which incidents are reported.
        evaluation: its name; "" for an update.
    """

    place: str
    update: int
    evaluation: str = ""


@final
class Recovery:
    """Does what ranks compute together until it is done.

    Args:
        execution: on which ranks.
        tasks: by name; they say how their batches are cut.
        cuts: how finely micro-batches are cut on this rank; lowered where one does not fit.
        report: told of incidents.
        on_out_of_memory: the policy for micro-batches that don't fit; None: they are cut.
    """

    def __init__(
        self,
        *,
        execution: Execution,
        tasks: Mapping[str, Task],
        cuts: SplitLimit,
        report: Callable[[Incident], None],
        on_out_of_memory: FailurePolicy | None = None,
    ) -> None:
        self._execution, self._tasks, self._cuts = execution, tasks, cuts
        self._report, self._policy = report, on_out_of_memory
        self._number = 0  # of the work

    def until_done(
        self, work: Work, compute: Callable[[Attempt], T], discard: Callable[[], None], *, together: bool = True
    ) -> T:
        """Compute until it succeeds on all ranks that do.

        Args:
            work: in words.
            compute: does it once, from the beginning; says in the attempt what it runs.
            discard: undoes what a failed try has left on this rank.
            together: whether ranks wait for each other in it; else each does its own by itself.

        Raises:
            OutOfMemoryError: this rank has no memory for it, and must not, or can't, cut any finer.
            LostRankError: another rank has failed for good, is gone, or has gone on to something else.
        """
        self._number = self._execution.group.begin_work() if together else 0
        while True:
            attempt, fault = Attempt(), ""
            try:
                return compute(attempt)
            except Exception as error:
                if is_out_of_memory(error):
                    fault = traceback.format_exc()
                elif not together or not self._was_woken(error):
                    raise
            # only here, where the error is gone: its traceback refers to all that must be freed
            reason = self._cut(work, attempt, fault) if fault else ""
            del attempt
            if not together:
                discard()
                give_back()
                continue
            told = self._meet(work.place, reason, self._cuts.limit, discard)
            known = [limit for limit in self._execution.alike(told) if limit is not None]
            self._cuts.limit = min(known, default=None)

    def once(self, place: str, compute: Callable[[], T]) -> tuple[T | None, bool]:
        """Compute once on all ranks; gives None where one had no memory for it, and whether it was in this pipeline."""
        self._number = self._execution.group.begin_work()
        ran_out = False
        try:
            return compute(), False
        except Exception as error:
            ran_out = is_out_of_memory(error)
            if not ran_out and not self._was_woken(error):
                raise
        reason = f"rank {self._execution.group.rank} ran out of memory in {place}" if ran_out else ""
        told = self._meet(place, reason, ran_out, lambda: None)
        return None, any(self._execution.alike(told))

    def _was_woken(self, error: Exception) -> bool:
        """Whether an error is that of connections which another rank has broken; an error of the user's own is not."""
        return isinstance(error, RuntimeError | LostRankError) and bool(self._execution.group.interrupted())

    def _meet(self, place: str, reason: str, said: T, discard: Callable[[], None]) -> list[T]:
        """Break off, let go of everything, and meet the others; gives what each has said.

        Args:
            place: of this rank.
            reason: why this rank breaks off; "" where another has.
            said: of this rank.
            discard: undoes what the failed try has left.
        """
        group = self._execution.group
        if reason:
            group.interrupt(reason)
        reason = reason or group.interrupted()
        self._execution.reset()
        discard()
        give_back()
        everybody = group.meet((place, self._number, said))
        here = place, self._number
        elsewhere = [(rank, where) for rank, (where, number, _) in enumerate(everybody) if (where, number) != here]
        if elsewhere:
            rank, where = elsewhere[0]
            raise LostRankError(
                f"{reason}, in {place}, when rank {rank} was in {where}, which can't be undone. Go on from "
                f"the last checkpoint, with smaller micro-batches."
            )
        return [theirs for _, _, theirs in everybody]

    def _cut(self, work: Work, attempt: Attempt, fault: str) -> str:
        """Cut finer what did not fit into memory; gives that in words.

        Raises:
            OutOfMemoryError: the policy says stop, or it can't be cut.
        """
        rank = self._execution.group.rank
        if attempt.step is None or attempt.step.doing is None:
            raise OutOfMemoryError(
                f"rank {rank} ran out of memory in {work.place}, outside of any micro-batch, so that nothing can be "
                f"cut. Make the micro-batches smaller (`data.micro_batch_size`), and go on from the last checkpoint."
            )
        phase, number, piece = attempt.step.doing
        microbatch = next(one for one in attempt.step.work if one.index == number)
        task = self._tasks[microbatch.task]
        message = f"rank {rank} ran out of memory in the {phase} of {_in_words(work, attempt, number, piece)}"
        incident = self._incident(work, attempt, microbatch, message, fault)
        self._report(incident)
        if self._policy is not None and self._policy(incident) is Answer.STOP:
            raise OutOfMemoryError(
                f"{message}. Make the micro-batches smaller, or let `failures.out_of_memory` be retry; the parameters "
                f"are those after update {work.update - 1}."
            )
        if self._cuts.finer(task, piece):
            return message
        advice = (
            f"The parameters are those after update {work.update}; evaluate smaller samples, or on a device with more "
            f"memory."
            if work.evaluation
            else f"Use a smaller model, shorter samples, a precision or optimizer that needs less memory, or a device "
            f"with more; if the batch holds several samples, `{type(task).__name__}.split` must say how it is cut."
            f"{self._cuts.why_whole(task, piece)}"
        )
        raise OutOfMemoryError(f"{message}, and that can't be cut any finer. {advice}")

    def _incident(self, work: Work, attempt: Attempt, microbatch: Microbatch, message: str, fault: str) -> Incident:
        assert attempt.step is not None and attempt.step.doing is not None
        phase, number, piece = attempt.step.doing
        again = "the batch is evaluated again" if work.evaluation else "the update is done again"
        details: dict[str, Json] = {"evaluation": work.evaluation} if work.evaluation else {"part": list(piece.path)}
        return Incident(
            kind="out_of_memory",
            update=work.update,
            message=f"{message}; it is cut in two from now on, and {again}.",
            details={"phase": phase, **details},
            rank=self._execution.group.rank,
            microbatch=None if attempt.is_dummy else number,
            stage=None if work.evaluation else 0,
            samples=() if work.evaluation or attempt.is_dummy else tuple(microbatch.samples),
            traceback=fault,
        )


def _in_words(work: Work, attempt: Attempt, number: int, piece: SubBatch) -> str:
    """What did not fit."""
    if work.evaluation:
        return f"{described(piece)} of evaluation '{work.evaluation}'"
    of = "a dummy pass" if attempt.is_dummy else f"micro-batch {number}"
    return f"{described(piece)} of {of} in update {work.update}"
