"""Requests of hooks, signals and users, which the loop executes at the end of an update on all ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from evenstep.data import Position
from evenstep.errors import EvenstepError
from evenstep.events import Hook
from evenstep.parallel import Group
from evenstep.train.progress import Result

T = TypeVar("T")


class Rewind(EvenstepError):
    """Raised to go back to a checkpoint of before `update`.

    Args:
        past: end of the data that are given up; None: the data are taken again.
    """

    def __init__(self, fault: str, *, update: int, past: Position | None) -> None:
        super().__init__(fault)
        self.update, self.past = update, past


class BrokenOff(BaseException):
    """Raised where a stop can't wait: between the batches of an evaluation, and by a signal while data are read.

    It is no `Exception`, so that code which reads samples does not take it for an unreadable one.
    """


@final
@dataclass(slots=True)
class Requests:
    """Open requests: of this rank, and after `agree` of all ranks.

    Args:
        stop: reason to stop, or "".
        requeue: the run is to be started again after it stopped.
        is_urgent: the stop does not wait for the end of an evaluation.
        pollers: hooks that look during an evaluation whether to stop.
    """

    stop: str = ""
    save: bool = False
    evaluate: bool = False
    requeue: bool = False
    is_urgent: bool = False
    pollers: Sequence[Hook] = ()
    _is_reading: bool = False

    def request_stop(self, reason: str, *, requeue: bool = False) -> None:
        """Stop at the end of this update; the last reason counts, but a stop for good comes before a requeue."""
        self.is_urgent |= requeue
        if not (requeue and self.is_for_good):
            self.stop, self.requeue = reason or "asked to stop", requeue

    def signal(self, reason: str, *, requeue: bool) -> None:
        """Stop because of a signal, in whose handler this is called; waiting for data is broken off."""
        self.request_stop(reason, requeue=requeue)
        self.is_urgent = True
        if self._is_reading:
            self._is_reading = False
            raise BrokenOff

    def reading(self, items: Iterator[T], group: Group) -> Iterator[T]:
        """The items of an iterator that reads data; on one process a signal breaks off waiting for the next."""
        if group.ranks > 1:  # the other ranks would wait for this rank
            yield from items
            return
        while True:
            try:
                self._is_reading = True
                item = next(items)
            except StopIteration:
                return
            finally:
                self._is_reading = False
            yield item

    def is_broken_off(self, group: Group) -> bool:
        """True if any rank has an urgent stop; all ranks call it together."""
        for hook in self.pollers:
            hook.poll()
        return group.sum_floats([self.is_urgent])[0] > 0

    @property
    def is_for_good(self) -> bool:
        return bool(self.stop) and not self.requeue

    def agree(self, group: Group) -> Result | None:
        """Take the requests of any rank to save and to evaluate; gives the end if any rank has requested to stop."""
        done, requeue, reason = self.is_for_good, self.requeue, self.stop
        if group.ranks > 1:
            sums = group.sum_floats([done, self.save, self.evaluate, requeue])
            done, self.save, self.evaluate, requeue = (total > 0 for total in sums)
            if done or requeue:
                reasons = [one for one, again in group.gather((reason, self.requeue)) if one and again is not done]
                reason = reasons[0]
        return Result(reason, "stopped", requeue=not done) if done or requeue else None

    def forget_stop(self) -> None:
        self.stop, self.requeue, self.is_urgent = "", False, False

    def forget_actions(self) -> None:
        self.save = self.evaluate = False
