"""What is done when a run ends by an error: the others are told, and what was committed is saved and reported.

It never hides the error that is in flight, and it cannot go on from it: that is a resume's, or a policy's.
"""

from collections.abc import Callable

from evenstep.errors import LostRankError
from evenstep.events import Incident
from evenstep.parallel import Group
from evenstep.train.loop import Loop
from evenstep.train.reporter import failed
from evenstep.train.run_state import RunState
from evenstep.train.saving import Saving, describe_failure


def salvage(
    error: BaseException,
    *,
    loop: Loop,
    group: Group,
    saving: Saving,
    report: Callable[[Incident], None],
    state: RunState,
    write: Callable[[], None],
    end: Callable[[BaseException], None],
) -> None:
    """Go back to the last committed update, save it and write what is known of it.

    Args:
        error: in flight.
        loop: that it has ended.
        group: all ranks.
        saving: of the run.
        report: told of the failure.
        state: of the run, of which this rank's part is saved.
        write: writes the metrics that are known.
        end: tells writers of the end.
    """
    try:
        if not isinstance(error, LostRankError):
            group.fail(f"{type(error).__name__}: {error}")
        under_way, is_whole = loop.failed, loop.update.is_whole
        loop.abandon()
        update, execution = loop.progress.update, loop.execution
        report(failed(error, group, update))
        strategy = execution.strategy
        failure = describe_failure(error, under_way, rank=strategy.rank, ranks=strategy.ranks)
        saving.rescue(error, update, state.part if is_whole else None, failure, part=state.part_held)
        if group.ranks == 1:  # the others may not be there to sum with
            write()
        end(error)
    except Exception as second:  # noqa: BLE001 - nothing is lost: it is attached to the error in flight
        error.add_note(f"Then writing the last metrics raised {type(second).__name__}: {second}")
