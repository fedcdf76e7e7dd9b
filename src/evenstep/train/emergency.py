"""What is done when a run ends by an error: the others are told, and what was committed is saved and reported.

It never hides the error that is in flight, and it cannot go on from it: that is a resume's, or a policy's.
"""

from collections.abc import Callable

from evenstep.errors import LostRankError
from evenstep.parallel.group import Interrupted
from evenstep.train.loop import Loop
from evenstep.train.reporter import failed
from evenstep.train.saving import describe_failure


def emergency_save(error: BaseException, loop: Loop, *, end: Callable[[BaseException], None]) -> None:
    """Go back to the last committed update, save it and write what is known of it.

    Args:
        error: in flight.
        loop: that it has ended.
        end: tells writers of the end.
    """
    engine, state, saving = loop.engine, loop.checkpointer.state, loop.checkpointer.saving
    try:
        if not isinstance(error, LostRankError) or isinstance(error, Interrupted):  # which another rank waits for
            engine.group.fail(f"{type(error).__name__}: {error}")
        is_whole = engine.core.is_whole
        loop.abandon()
        update, reducers = engine.progress.update, engine.reducers
        loop.reporter.report(failed(error, engine.group, update))
        failure = describe_failure(error, loop.in_progress, rank=reducers.rank, ranks=reducers.ranks)
        saving.rescue(error, update, state.part if is_whole else None, failure, part=state.part_held)
        if engine.group.ranks == 1:  # the others may not be there to sum with
            loop.write_known()
        end(error)
    except Exception as second:  # noqa: BLE001 - nothing is lost: it is attached to the error in flight
        error.add_note(f"Then writing the last metrics raised {type(second).__name__}: {second}")
