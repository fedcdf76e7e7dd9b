"""Membership of a run: which ranks are there, and why the current epoch of their connections is over.

A thread of each rank writes a heartbeat to a store and reads a log there that all ranks append to.
"""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any, NamedTuple, TypeVar, cast, final

from evenstep.errors import EvenstepError, clause, keepable
from evenstep.internals import PrefixStore, Store, TCPStore
from evenstep.parallel.rank_info import RankInfo

T = TypeVar("T")
ANSWER_S = 3.0  # a rank whose heartbeat stands still for so long is lost
_GRACE_S = 1.0  # for a rank that is about to raise the error that has ended another
_BEAT_S = 0.1
_BEATS_PER_S = 2000  # of all ranks together, as one process serves the store
_QUERY_EVERY_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between two looks for the others
_TRY_S = 5.0  # to reach rank 0
_FAILED = -1  # in place of the number of a work: comes before all of them


class _Beat(NamedTuple):
    number: int = 0
    lines: int = 0  # of the log that the rank has read
    waits: bool = False  # for other ranks


def connect(info: RankInfo, timeout_s: float) -> Store:
    """The store through which the ranks find each other: served by the launcher, or else by rank 0."""
    at = f"{info.address}:{info.port}"
    serves = info.rank == 0 and not info.store_is_served
    try:
        if not serves and not wait_until(lambda: _listens(info), timeout_s):
            raise TimeoutError("no answer")
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(
            info.address, info.port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch's DistError among them
        what = f"could not listen at {at}" if serves else f"found nobody listening at {at} within {timeout_s:g} s"
        raise EvenstepError(
            f"{info} {what}: {clause(str(error).partition(chr(10))[0])}. MASTER_ADDR must be rank 0's machine, and "
            f"MASTER_PORT a free port of it; set both alike on all ranks, and let no firewall stand between."
        ) from error
    return PrefixStore(f"evenstep/{info.attempt}/{info.ranks}", store)  # a launcher's keeps keys of earlier attempts


def _listens(info: RankInfo) -> bool:
    """True if rank 0 listens; torch's store would log every try, and no signal ends its wait."""
    try:
        with socket.create_connection((info.address, info.port), timeout=_TRY_S) as tried:
            return tried.getsockname() != tried.getpeername()  # a port that is free may be given to the one who asks
    except OSError:
        return False


def wait_until(found: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something is found, with ever longer pauses; True if it was in time.

    The store's own wait hears no signal, and torch warns on standard error when it ends without.
    """
    until, pause_s = monotonic() + timeout_s, _FIRST_PAUSE_S
    while not found():
        if monotonic() > until:
            return False
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


@final
class Membership:
    """One rank's view of the members.

    Args:
        break_: gives a function that closes the connections of now; called by any thread.
        answer_s: after how many seconds without a heartbeat a rank is lost.
        holds_store: True if the store ends with this process, which therefore leaves last.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        break_: Callable[[], Callable[[], None]],
        *,
        answer_s: float = ANSWER_S,
        holds_store: bool = False,
    ) -> None:
        self._store = store.clone()  # no wait of another user of the store holds up the heartbeat
        self._rank, self._ranks, self._break = rank, ranks, break_
        self._answer_s, self._holds_store = answer_s, holds_store
        self.epoch = 0  # number of the connections that exist now; 0 until all ranks have come
        self.work = 0  # number of the work that the ranks compute together now
        self.update = 0  # that is being computed, for messages
        self.waits = False  # for other ranks
        self._count = self._lines = 0
        self._ends: list[tuple[int, int, str]] = []  # epoch, work and reason, in the order of the log
        self._break_at = inf  # after a failure
        self.left: list[int] = []  # ranks whose programs have ended
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._has_left = self._store_is_gone = False
        self._store.append("log", "\n")  # so that it exists
        self._beat()
        self._thread = threading.Thread(target=self._run, daemon=True, name="evenstep-membership")
        self._thread.start()

    def begin_work(self) -> int:
        self.work += 1
        self.break_if_over()
        return self.work

    def break_if_over(self) -> None:
        """Close the connections if a rank has interrupted the current work, or an earlier one.

        Not before this rank has begun the interrupted work: until then it may still read what others have sent.
        """
        break_ = self._break()
        if self._known_interruption:  # asked only now: if the epoch is over still, none of the connections is newer
            break_()

    @property
    def known_failure(self) -> str:
        """`failure` as far as this rank's thread has read."""
        work, reason = self._end
        return reason if work == _FAILED else ""

    @property
    def _known_interruption(self) -> str:
        work, reason = self._end
        return reason if 0 <= work <= self.work else ""

    def over(self) -> str:
        """Reason why this epoch is over, for all works; "" if it is not."""
        self._now(self._beat, None)
        return self._end[1]

    def failure(self) -> str:
        """Message of the first failing rank, or ""."""
        if not self.known_failure:
            self._now(self._beat, None)
        return self.known_failure

    def interrupted(self) -> str:
        """Reason of a rank for interrupting the current work; "" without one."""
        self._now(self._beat, None)
        return self._known_interruption

    def fail(self, message: str) -> None:
        """Post that this rank fails; of several messages the first counts."""
        self._append(["over", self.epoch, _FAILED, keepable(message) or "failed"])

    def interrupt(self, reason: str) -> None:
        """Post that this rank interrupts the current work; of several works the earliest counts."""
        self._append(["over", self.epoch, self.work, keepable(reason)])

    def absent(self, *, is_late: bool = False) -> list[int] | None:
        """Ranks without a heartbeat, or if a wait `is_late` those that do not wait too; None without the store."""
        before = self._beats()
        until = monotonic() + self._answer_s
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        while beats := self._beats():
            silent = [rank for rank in others if before[rank].number == beats[rank].number]
            if not silent:
                return [rank for rank in others if is_late and not beats[rank].waits]
            if monotonic() > until:
                return silent
            sleep(_BEAT_S / 2)
        return None

    def meet(self, value: bytes, timeout_s: float, *, after_failure: bool = False) -> tuple[list[bytes], list[int]]:
        """Exchange values between all ranks at the end of this epoch; `after_failure`: they go on after a failure.

        Gives the values by rank, or the ranks that are lost or late. Both are empty if a rank has failed for good, or
        the store is gone.
        """
        count, keys = f"met {self.epoch}", [f"met {self.epoch} {rank}" for rank in range(self._ranks)]
        until, query_at, pause_s = monotonic() + timeout_s, monotonic() + _QUERY_EVERY_S, _FIRST_PAUSE_S
        self._now(lambda: self._store.set(keys[self._rank], value), None)
        self._now(lambda: self._store.add(count, 1), 0)
        while not self._store_is_gone and (after_failure or not self.known_failure):
            if self._now(lambda: self._store.add(count, 0), 0) >= self._ranks:
                return self._now(lambda: self._store.multi_get(keys), []), []
            if monotonic() > query_at:
                lost = self.absent() or [] if self.epoch else []  # else they may not have been started
                missing = self._now(lambda: [n for n, key in enumerate(keys) if not self._store.check([key])], [])
                gone = [rank for rank in missing if rank in lost or monotonic() > until]
                if gone:
                    return [], gone
                query_at = monotonic() + _QUERY_EVERY_S
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return [], []

    def leave(self, *, waits: bool = True) -> None:
        """End the heartbeat; unless this process goes on in another group, after others have read why it fails."""
        if waits:
            self._append(["left", self._rank])
        if waits and (self._holds_store or self.failure()):
            until, mine = monotonic() + ANSWER_S, self._lines
            while not self._store_is_gone and monotonic() < until and self._unaware(mine):
                sleep(_BEAT_S / 2)
        self._has_left = True
        self._jobs.put((lambda: None, Future()))
        self._thread.join(ANSWER_S if not self._store_is_gone else 0)

    def _unaware(self, lines: int) -> bool:
        others = set(range(self._ranks)) - {self._rank, *self.left}
        beats = self._beats()
        return any(not self.known_failure or beats[rank].lines < lines for rank in others if beats)

    @property
    def _end(self) -> tuple[int, str]:
        ends = [(work, reason) for epoch, work, reason in self._ends if epoch == self.epoch]
        return min(ends, key=lambda one: one[0], default=(0, ""))

    def _append(self, line: list[Any]) -> None:
        def act() -> None:
            self._store.append("log", json.dumps(line) + "\n")
            self._beat()

        self._now(act, None)

    def _run(self) -> None:
        beat_s = max(_BEAT_S, self._ranks / _BEATS_PER_S)
        answer: Future[Any] | None = None
        try:
            while not self._has_left:
                try:
                    act, answer = self._jobs.get(timeout=beat_s)
                    answer.set_result(act())
                except Empty:
                    self._beat()
        except RuntimeError as error:  # torch's DistError: the store is gone; the caller raises another error
            self._store_is_gone = True
            if answer is not None and not answer.done():
                answer.set_exception(error)

    def _beat(self) -> None:
        lines = cast("bytes", self._store.get("log")).decode().splitlines()
        new = [json.loads(line) for line in lines[self._lines :] if line]
        self.left += [rank for kind, rank, *_ in new if kind == "left"]
        self._ends += [(epoch, *end) for kind, epoch, *end in new if kind == "over"]
        self._lines = len(lines)
        self._count += 1
        self._store.set(f"beat {self._rank}", json.dumps(_Beat(self._count, self._lines, self.waits)))
        if new:
            self.break_if_over()
            self._break_at = monotonic() + _GRACE_S
        if self.known_failure and monotonic() > self._break_at:
            self._break_at = inf
            self._break()()

    def _beats(self) -> list[_Beat]:
        def act() -> list[_Beat]:
            self._beat()
            keys = [f"beat {rank}" for rank in range(self._ranks)]
            return [_Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else _Beat() for key in keys]

        return self._now(act, [])

    def _now(self, act: Callable[[], T], default: T) -> T:
        if self._store_is_gone or self._has_left:
            return default
        answer: Future[T] = Future()
        self._jobs.put((act, answer))
        try:
            return answer.result(ANSWER_S)
        except (RuntimeError, TimeoutError):  # the store is gone or frozen
            self._store_is_gone = True
            return default
