"""What an engine of one's own tells its tasks: that an update, or an evaluation, begins and ends.

A trainer's loop tells its hooks and tasks by itself, with more than an engine knows.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from evenstep.data import GlobalBatch
from evenstep.events import EvaluateBegin, EvaluateEnd, UpdateBegin, UpdateEnd

if TYPE_CHECKING:
    from evenstep.train.engine import Engine

EVALUATION = "evaluate"
"""What tasks are told that an engine's evaluation is called."""


def around_update(engine: "Engine", batch: GlobalBatch) -> AbstractContextManager[None]:
    """Between `before_update` and `after_update` of the next update."""
    number = engine.progress.update + 1

    def end(error: BaseException | None) -> UpdateEnd:
        committed = error is None and engine.progress.update >= number
        return UpdateEnd(update=number, committed=committed, num_samples=batch.num_samples)

    begin = UpdateBegin(update=number, num_microbatches=batch.num_microbatches)
    return engine.bus.span("update", lambda: begin, end)


def around_evaluation(engine: "Engine", values: Mapping[str, float]) -> AbstractContextManager[None]:
    """Between `before_evaluate` and `after_evaluate`.

    Args:
        values: the metrics by name, which are there at the end.
    """
    update = engine.progress.update
    return engine.bus.span(
        "evaluate",
        lambda: EvaluateBegin(update=update, name=EVALUATION),
        lambda error: EvaluateEnd(update=update, name=EVALUATION, metrics=values),
    )
