"""Where the time of a run goes: every moment of the training thread is counted for one phase.

    data        waiting for a global batch        forward   with the loss        apply     norm, clip, step, average
    transfer    batches to the device             backward                       hooks     before and after updates
    weigh       weights, over all ranks           reduce    sums over ranks      messages  between stages
    compiled    an update that is one graph       evaluate, save, write (metrics), check (losses), loop (all the rest)

A lap counts the time since the lap before for what was done in it, so nothing is missed and nothing counted twice. It
reads the host's clock and never waits for a device: where an accelerator runs behind, a phase is what the host took for
it, and waiting shows where the host waits.
"""

from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Final, final

from evenstep.pipeline import Op

PHASES: Final = (
    *("data", "transfer", "weigh", "forward", "backward", "reduce", "messages", "apply", "compiled"),
    *("hooks", "evaluate", "save", "write", "check", "loop"),
)
_OF_OP: Final = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_BACKWARD: "backward",
    Op.WEIGHT_BACKWARD: "backward",
    Op.SEND_OUTPUT: "messages",
    Op.RECEIVE_INPUT: "messages",
    Op.SEND_GRADIENT: "messages",
    Op.RECEIVE_GRADIENT: "messages",
    Op.ARM: "reduce",
    Op.REDUCE: "reduce",
    Op.UNSHARD: "reduce",
    Op.RESHARD: "reduce",
}


@final
class Phases:
    """Counts seconds by phase.

    >>> phases = Phases()
    >>> before = phases.lap("loop")
    >>> phases.lap("forward") >= before
    True
    >>> spent = phases.take()
    >>> spent["forward"] > 0, spent["data"]
    (True, 0.0)
    """

    __slots__ = ("_last", "_spent")

    def __init__(self) -> None:
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._last = perf_counter()

    def lap(self, phase: str) -> float:
        """Count what has gone by since the last lap for `phase`; gives the clock's time, in seconds."""
        now = perf_counter()
        self._spent[phase] += now - self._last
        self._last = now
        return now

    def acted(self, op: Op) -> None:
        """The same for an action of a plan."""
        now = perf_counter()
        self._spent[_OF_OP[op]] += now - self._last
        self._last = now

    @contextmanager
    def only(self, phase: str) -> Generator[None]:
        """Count all that goes by inside for `phase`, whatever laps there are; what came before is the loop's."""
        began = self.lap("loop")
        spent, self._spent = self._spent, dict.fromkeys(PHASES, 0.0)
        try:
            yield
        finally:
            self._spent = spent
            self._last = perf_counter()
            spent[phase] += self._last - began

    def take(self) -> dict[str, float]:
        """The seconds by phase since this was last called."""
        self.lap("hooks")
        spent, self._spent = self._spent, dict.fromkeys(PHASES, 0.0)
        return spent
