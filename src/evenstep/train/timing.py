"""Seconds of a run by phase.

    data        waiting for a global batch        forward   with the loss        apply     norm, clip, step, average
    transfer    batches to the device             backward                       hooks     before and after updates
    weigh       weights, over all ranks           reduce    sums over ranks      messages  between stages
    compiled    an update that is one graph       evaluate, save, write (metrics), check (losses), loop (the rest)

The host's clock is read, and no device is waited for: where an accelerator runs behind, a phase is the host's time.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Final, final

from evenstep.pipeline import Op

PHASES: Final = (
    *("data", "transfer", "weigh", "forward", "backward", "reduce", "messages", "apply", "compiled"),
    *("hooks", "evaluate", "save", "write", "check", "loop"),
)
_OF_OP: Final = {  # ARM sets a flag, and counts for the backward that follows
    Op.FORWARD: "forward",
    **dict.fromkeys((Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD), "backward"),
    **dict.fromkeys((Op.SEND_OUTPUT, Op.RECEIVE_INPUT, Op.SEND_GRADIENT, Op.RECEIVE_GRADIENT), "messages"),
    **dict.fromkeys((Op.REDUCE, Op.UNSHARD, Op.RESHARD), "reduce"),
}


@final
class Phases:
    """Counts every moment of the training thread for one phase.

    Attributes:
        lap: counts the time since the last lap for a phase; gives the clock's time, in seconds.
        acted: the same for an action of a plan, by its kind.
    """

    __slots__ = ("_spent", "acted", "lap")

    def __init__(self) -> None:
        self._spent = spent = dict.fromkeys(PHASES, 0.0)
        clock, of_op = perf_counter, _OF_OP
        last = clock()

        # functions that share a variable: attributes would take twice as long
        def lap(phase: str) -> float:
            nonlocal last
            now = clock()
            spent[phase] += now - last
            last = now
            return now

        def acted(op: Op) -> None:
            phase = of_op.get(op)
            if phase is not None:
                lap(phase)

        self.lap: Callable[[str], float] = lap
        self.acted: Callable[[Op], None] = acted

    @contextmanager
    def only(self, phase: str) -> Generator[None]:
        """Count the time inside the `with` for `phase`, whatever laps there are."""
        began = self.lap("loop")
        before = dict(self._spent)
        try:
            yield
        finally:
            ended = self.lap(phase)
            self._spent.update(before)
            self._spent[phase] += ended - began

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self.lap("hooks")
        spent = dict(self._spent)
        self._spent.update(dict.fromkeys(PHASES, 0.0))
        return spent
