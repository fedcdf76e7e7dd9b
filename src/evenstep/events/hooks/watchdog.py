"""Ends a rank that hangs, such as in a deadlock, with the stack of every thread on standard error."""

import faulthandler
import sys
from time import monotonic
from typing import final

from evenstep.events.event import Event, TrainEvent, UpdateEvent
from evenstep.events.hook import Hook
from evenstep.schema import Positive

SLACK = 20.0
FIRST_UPDATES = 3
"""Updates that are not watched, because they may compile."""
ARMED_EVERY_S = 1.0
"""Arming starts a thread."""


@final
class Watchdog(Hook):
    """Ends the process when an update takes `timeout_s`, and 20 times as long as any update before.

    Python's `faulthandler` does it, so also when the interpreter hangs. Evaluations and saves are not watched.

    Args:
        timeout_s: shortest time that counts as hanging, in seconds.

    >>> hook = Watchdog(timeout_s=120)
    """

    draws = False

    def __init__(self, *, timeout_s: Positive) -> None:
        self._timeout_s = timeout_s
        self._longest_s = 0.0
        self._began = 0.0
        self._armed_at = 0.0
        self._updates = 0

    def before_update(self, event: UpdateEvent) -> None:
        self._arm()

    def after_update(self, event: UpdateEvent) -> None:
        self._longest_s = max(self._longest_s, monotonic() - self._began)
        self._updates += 1
        self._arm()

    def before_evaluate(self, event: Event) -> None:
        self._disarm()

    def after_evaluate(self, event: Event) -> None:
        self._arm()

    before_save = before_evaluate
    after_save = after_evaluate

    def after_train(self, event: TrainEvent) -> None:
        self._disarm()
        self._updates = 0

    def _arm(self) -> None:
        self._began = monotonic()
        if self._updates < FIRST_UPDATES or self._began - self._armed_at < ARMED_EVERY_S:
            return
        self._armed_at = self._began
        after_s = ARMED_EVERY_S + max(self._timeout_s, SLACK * self._longest_s)
        faulthandler.dump_traceback_later(after_s, exit=True, file=sys.__stderr__ or sys.stderr)

    def _disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = 0.0
