"""End a rank that no longer gets on, and say where it stands: a deadlock in user code, a lock held for ever.

The others stop by themselves when they have waited too long, but nobody would learn what the missing rank was doing.
Python's own watchdog writes the stack of every thread to standard error and ends the process, also when the
interpreter is stuck. Evaluations and saves, which may take their time, are not watched.
"""

import faulthandler
import sys
from time import monotonic
from typing import final

from evenstep.events.event import EvaluateBegin, EvaluateEnd, SaveBegin, SaveEnd, TrainEnd, UpdateBegin, UpdateEnd
from evenstep.events.hook import Hook

SLACK = 20.0
FIRST_UPDATES = 3
ARMED_EVERY_S = 1.0


@final
class Watchdog(Hook):
    """Ends the process when an update takes `timeout_s`, and 20 times as long as any before it.

    Args:
        timeout_s: the shortest time that counts as being stuck, in seconds.

    >>> hook = Watchdog(timeout_s=120)
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_s = 0.0
        self._beat_at = 0.0
        self._armed_at = 0.0
        self._updates = 0

    def before_update(self, event: UpdateBegin) -> None:
        self._beat()

    def after_update(self, event: UpdateEnd) -> None:
        self._longest_s = max(self._longest_s, monotonic() - self._beat_at)
        self._updates += 1
        self._beat()

    def before_evaluate(self, event: EvaluateBegin) -> None:
        self._rest()

    def after_evaluate(self, event: EvaluateEnd) -> None:
        self._beat()

    def before_save(self, event: SaveBegin) -> None:
        self._rest()

    def after_save(self, event: SaveEnd) -> None:
        self._beat()

    def after_train(self, event: TrainEnd) -> None:
        self._rest()
        self._updates = 0

    def _beat(self) -> None:
        self._beat_at = monotonic()
        if self._updates < FIRST_UPDATES or self._beat_at - self._armed_at < ARMED_EVERY_S:
            return  # the first updates may compile; and arming costs a thread
        self._armed_at = self._beat_at
        after_s = ARMED_EVERY_S + max(self._timeout_s, SLACK * self._longest_s)
        faulthandler.dump_traceback_later(after_s, exit=True, file=sys.__stderr__ or sys.stderr)

    def _rest(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = 0.0
