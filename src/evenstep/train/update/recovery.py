"""Break, meet, redo: repeats the work that ranks do together after one of them has run out of memory."""

from collections.abc import Callable, Iterator, Sequence
from traceback import format_exception
from types import TracebackType
from typing import Self, TypeVar, final

from evenstep.data import Microbatch
from evenstep.data.split import num_samples
from evenstep.errors import LostRankError, OutOfMemoryError
from evenstep.events import Incident
from evenstep.oom import give_back, is_out_of_memory
from evenstep.parallel.group import Interrupted
from evenstep.train.update.execution import Execution
from evenstep.train.update.microbatch import TrainContext

T = TypeVar("T")


@final
class Recovery:
    """Attempts at work that ranks do together; as a context, one attempt, which lack of memory does not leave.

    Args:
        context: its `cuts` become finer where a micro-batch does not fit.
        may_cut: False to stop where a micro-batch does not fit.
        evaluation: its name, if the work is no update; each rank may attempt its own part of one.
    """

    def __init__(
        self,
        *,
        execution: Execution,
        context: TrainContext,
        may_cut: bool = True,
        evaluation: str = "",
    ) -> None:
        self._execution = execution
        self._context = context
        self._may_cut = may_cut
        self._evaluation = evaluation
        self._is_joint = not evaluation or execution.evaluates_together
        self._traceback: str | None = None  # of a failed attempt; the error would hold the memory that must be freed
        self._interruption = ""  # the reason of another rank, if one has ended the attempt

    def attempts(self, place: str, update: int, undo: Callable[[], None]) -> Iterator[Self]:
        """Attempts at the same work, until one has succeeded on all ranks.

            for attempt in recovery.attempts(…):
                with attempt:
                    …

        Args:
            place: name of the work, by which ranks see that they do the same.
            update: number under which incidents are reported.
            undo: undoes on this rank a failed attempt.
        """
        execution, cuts = self._execution, self._context.cuts
        number = execution.group.begin_work() if self._is_joint else 0
        while True:
            execution.running = None
            yield self
            if self._traceback is None:
                execution.running = None
                return
            reason = self._interruption or self._cut(place, update, self._traceback)
            execution.running = None  # it holds the memory that must be freed
            if self._is_joint:
                limits = self._meet(place, number, reason, cuts.limit, undo)
                cuts.limit = min((limit for limit in limits if limit is not None), default=None)
            else:
                undo()
                give_back()

    def once(self, place: str, compute: Callable[[], None]) -> None:
        """Compute once on all ranks, or leave it where a rank has no memory for it."""
        group = self._execution.group
        number = group.begin_work()
        with self:
            compute()
        if self._traceback is not None:
            reason = self._interruption or f"rank {group.rank} ran out of memory in {place}"
            self._meet(place, number, reason, None, lambda: None)

    def __enter__(self) -> None:
        self._traceback = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        self._interruption = ""
        if not is_out_of_memory(error):
            if not self._is_joint or not isinstance(error, RuntimeError | LostRankError):
                return False
            reason = self._execution.group.interrupted() or (str(error) if isinstance(error, Interrupted) else "")
            self._interruption = reason.rstrip(".")
            if not self._interruption:
                return False
        self._traceback = "".join(format_exception(error))
        return True

    def _meet(self, place: str, number: int, reason: str, value: T, undo: Callable[[], None]) -> Sequence[T]:
        """Undo the attempt on all ranks; gives their values."""
        if not self._interruption:
            self._execution.group.interrupt(reason)
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
        return [theirs for _, _, theirs in everybody]

    def _cut(self, place: str, update: int, traceback: str) -> str:
        """Cut the current micro-batch finer; gives the reason for the other ranks."""
        step, cuts, rank = self._execution.running, self._context.cuts, self._execution.group.rank
        if step is None or step.doing is None:
            raise OutOfMemoryError(
                f"rank {rank} ran out of memory in {place}, outside of any micro-batch. Make the micro-batches smaller "
                f"(`data.micro_batch_size`), and go on from the last checkpoint."
            )
        phase, piece = step.doing
        task = self._context.tasks[piece.task]
        is_counted = not self._evaluation and not step.is_dummy
        where = f"{'a dummy pass' if step.is_dummy else f'micro-batch {piece.index}'} in update {update}"
        if self._evaluation:
            where = f"evaluation '{self._evaluation}'"
        message = f"rank {rank} ran out of memory in the {phase} of {_title(piece)} of {where}"
        can_be_cut = cuts.can_be_cut(task, piece)
        end = "is cut in two from now on, and computed again" if can_be_cut else "can't be cut any finer"
        incident = Incident(
            kind="out_of_memory",
            update=update,
            message=f"{message}; it {end}.",
            details={"phase": phase, "part": list(piece.part)},
            rank=rank,
            microbatch=piece.index if is_counted else None,
            samples=tuple(piece.samples) if is_counted else (),
            traceback=traceback,
        )
        self._context.report(incident)
        if not self._may_cut:
            advice = "Make the micro-batches smaller, or let `failures.out_of_memory` be retry"
        elif can_be_cut:
            cuts.cut_finer(task, piece)
            return message
        else:
            advice = f"Say in `{type(task).__name__}.split` how it is cut, or use shorter samples or fewer blocks"
        kept = update if self._evaluation else update - 1
        raise OutOfMemoryError(f"{message}; it {end}. {advice}. The parameters are those after update {kept}.")


def _title(piece: Microbatch) -> str:
    count = num_samples(piece.data, piece.known_samples)
    return "a micro-batch" if count is None else f"{count} sample{'' if count == 1 else 's'}"
