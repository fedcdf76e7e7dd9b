"""What hooks and tasks are told of: that an update of an engine of one's own, or any evaluation, begins and ends.

Of its updates a trainer's loop tells by itself, with more than an engine knows.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from evenstep.data import GlobalBatch
from evenstep.events import Bus, EvaluateBegin, EvaluateEnd, UpdateBegin, UpdateEnd

EVALUATION = "evaluate"
"""What tasks are told that an engine's evaluation is called."""


def around_update(
    bus: Bus, update: int, batch: GlobalBatch, *, is_committed: Callable[[], bool]
) -> AbstractContextManager[None]:
    """Between `before_update` and `after_update` of the update of this number.

    Args:
        is_committed: whether it is; asked at its end.
    """

    def end(error: BaseException | None) -> UpdateEnd:
        committed = error is None and is_committed()
        return UpdateEnd(update=update, committed=committed, num_samples=batch.num_samples)

    begin = UpdateBegin(update=update, num_microbatches=batch.num_microbatches)
    return bus.span("update", lambda: begin, end)


def around_evaluation(bus: Bus, update: int, name: str, values: Mapping[str, float]) -> AbstractContextManager[None]:
    """Between `before_evaluate` and `after_evaluate` of the parameters after `update`, on the set of this name.

    Args:
        values: the metrics by name, which are there at the end.
    """
    return bus.span(
        "evaluate",
        lambda: EvaluateBegin(update=update, name=name),
        lambda error: EvaluateEnd(update=update, name=name, metrics=values),
    )
