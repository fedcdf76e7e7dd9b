"""Notices between ranks beside their collectives: failures, broken-off attempts and ranks that left.

A thread of each rank watches the rendezvous store and answers for it; a failing rank stays until others have read why.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar, cast, final

from torch.distributed import DistStoreError

from evenstep.errors import keepable
from evenstep.parallel.rendezvous import wait_until

T = TypeVar("T")
ANSWER_S = 3.0
_BROKEN = "broken"
_BELL, _ALIVE, _READ, _LEFT = "bell", "alive", "read", "left"  # of each rank
_WAITS = "waits"
_A_MOMENT_S = 0.2
_QUERY_EVERY_S = 1.0
_A_DAY = timedelta(days=1)
_LOOKED_EVERY_S = 0.05
_RINGS_AFTER_S = 0.5


@final
class Notices:
    """One rank's access to the notices.

    Args:
        store: a `torch.distributed.Store` that only these ranks use.
        ranks: how many there are.
        answer_s: after how many seconds without an answer a rank is gone.
        holds_store: whether the store ends with this process, which therefore leaves last.
        broken: called by the watching thread with the numbers of an attempt and of the work that a rank has broken
            off in it.

    Attributes:
        attempt: number of the connections that there are; a failure ends with its attempt.
        is_waiting: this rank waits for others, which its thread tells those that ask.
        left: the ranks whose programs have ended, as far as this rank's thread has read of them.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        *,
        answer_s: float = ANSWER_S,
        holds_store: bool = False,
        broken: Callable[[int, int], None] = lambda attempt, work: None,
    ) -> None:
        self._store = store
        self._broken = broken
        self._rank = rank
        self._ranks = ranks
        self._answer_s = answer_s
        self._holds_store = holds_store
        self._failure = 0, ""  # an attempt, and the message of its first failing rank
        self._is_leaving = self._store_is_gone = False
        self._silent: list[int] = []
        self.attempt = 0
        self.is_waiting = False
        self.left: list[int] = []
        self._listener = threading.Thread(target=self._listen, args=(store.clone(),), daemon=True, name="notices")
        self._listener.start()

    @property
    def failure_message(self) -> str:
        """The message of the first failing rank, once this rank's thread has read it."""
        attempt, message = self._failure
        return message if attempt == self.attempt else ""

    def post(self, message: str) -> None:
        """Post that this rank fails, unless another has posted so before."""

        def act() -> None:
            self._store.compare_set(f"failed {self.attempt}", "", keepable(message) or "failed")
            self._ring()

        self._briefly(act, None)

    def failure(self) -> str:
        """The message of the first failing rank, or ""."""
        return self.failure_message or self._briefly(lambda: _read(self._store, f"failed {self.attempt}"), "")

    def ended(self) -> list[int]:
        """The ranks whose programs have ended."""
        return self.left or self._briefly(lambda: self._having_left(self._store), [])

    def missing(self, *, late: bool) -> list[int] | None:
        """Ranks that do not answer, or else, if `late` ones count, that do not wait; None without the store."""
        silent = self.silent()
        if silent is None or silent or not late:
            return silent
        return [rank for rank, said in enumerate(self._answers()) if rank != self._rank and not said.endswith(_WAITS)]

    def silent(self) -> list[int] | None:
        """The ranks whose threads do not answer within seconds, so that they are gone; None without the store."""
        before = self._answers()
        self._briefly(self._ring, None)
        if self._store_is_gone:
            return None
        until = monotonic() + self._answer_s
        while True:
            pairs = zip(before, self._answers(), strict=False)
            self._silent = [rank for rank, (then, now) in enumerate(pairs) if then == now and rank != self._rank]
            if not self._silent or monotonic() > until:
                return self._silent
            sleep(_LOOKED_EVERY_S)

    def break_off(self, work: int, reason: str) -> None:
        """Post that this rank breaks off a work in this attempt, and why; of several the earliest counts."""
        attempt = self.attempt
        key, mine = f"{_BROKEN} {attempt}", keepable(f"{work} {reason}")

        def act() -> None:
            stands = cast("bytes", self._store.compare_set(key, "", mine)).decode()
            while stands != mine and work < _broken_in(stands)[0]:
                stands = cast("bytes", self._store.compare_set(key, stands, mine)).decode()
            self._store.set(_BROKEN, str(attempt))
            self._ring()

        self._briefly(act, None)

    def broken_off(self) -> tuple[int, str]:
        """The work that a rank has broken off in this attempt, and why; (0, "") if none has."""
        return self._briefly(lambda: _broken_in(_read(self._store, f"{_BROKEN} {self.attempt}")), (0, ""))

    def meet(
        self, value: bytes, timeout_s: float, *, after_failure: bool = False
    ) -> tuple[list[bytes], list[int] | None]:
        """Write a value, and wait for the values of all ranks in this attempt, which is over then.

        Args:
            timeout_s: the longest wait for ranks that are alive.
            after_failure: all ranks are expected to go on after a failure.

        Returns:
            The values by rank, and []; or no values, and the ranks that are gone, or have not come in time; None in
            their place if a rank has failed for good, or the store is gone.
        """
        keys = [f"met {self.attempt} {rank}" for rank in range(self._ranks)]
        until, next_query = monotonic() + timeout_s, monotonic() + _QUERY_EVERY_S

        def come() -> list[bytes]:
            have_come = wait_until(lambda: self._store.check(keys), _A_MOMENT_S, longest_s=_LOOKED_EVERY_S / 10)
            return [self._store.get(key) for key in keys] if have_come else []

        self._briefly(lambda: self._store.set(keys[self._rank], value), None)
        while after_failure or not self.failure():
            values = self._briefly(come, None)
            if values:
                return values, []
            if values is None:
                break
            if monotonic() < next_query:
                continue
            next_query = monotonic() + _QUERY_EVERY_S
            silent = self.silent()
            if silent is None:
                break
            absent = self._briefly(lambda: [rank for rank, key in enumerate(keys) if not self._store.check([key])], [])
            gone = [rank for rank in absent if rank in silent or monotonic() > until]
            if gone:
                return [], gone
        return [], None

    def leave(self, *, waits: bool = True) -> None:
        """Watch no more; a rank that keeps the others' store, or has posted a notice for them, stays until they know.

        Args:
            waits: for them; not needed where this process goes on.
        """
        self._is_leaving = True
        failure = self.failure()
        until, rings = monotonic() + ANSWER_S, monotonic() + _RINGS_AFTER_S

        def act() -> None:
            if waits:
                self._store.set(_of(_LEFT, self._rank), "1")
            self._store.set(_of(_BELL, self._rank), "1")

        self._briefly(act, None)
        self._listener.join(ANSWER_S if not self._store_is_gone else 0)
        while waits and (self._holds_store or failure) and not self._store_is_gone and monotonic() < until:
            if not self._briefly(self._unaware, set[int]()) - set(self._silent):
                break
            if monotonic() > rings:  # they go on, and will not be able to read it when the store is gone
                self._briefly(self._ring, None)
                rings = until
            sleep(_LOOKED_EVERY_S)

    def _unaware(self) -> set[int]:
        ranks = set(range(self._ranks)) - {self._rank}
        keys = f"{_READ} {self.attempt}", _LEFT
        return {rank for rank in ranks if not any(self._store.check([_of(key, rank)]) for key in keys)}

    def _listen(self, store: Any) -> None:
        bell, answers = _of(_BELL, self._rank), 0
        try:
            while not self._is_leaving:
                if not _rings(store, bell):
                    continue
                store.delete_key(bell)
                answers += 1
                store.set(_of(_ALIVE, self._rank), f"{answers} {_WAITS if self.is_waiting else ''}")
                self.left = self._having_left(store)
                if attempt := _read(store, _BROKEN):
                    self._broken(int(attempt), _broken_in(_read(store, f"{_BROKEN} {attempt}"))[0])
                now = self.attempt
                if message := _read(store, f"failed {now}"):
                    self._failure = now, message
                    store.set(_of(f"{_READ} {now}", self._rank), "1")
        except RuntimeError:  # torch's DistError: the store is gone; ranks that wait for its process time out
            return

    def _having_left(self, store: Any) -> list[int]:
        return [rank for rank in range(self._ranks) if store.check([_of(_LEFT, rank)])]

    def _ring(self) -> None:
        for rank in range(self._ranks):
            self._store.set(_of(_BELL, rank), "1")

    def _answers(self) -> list[str]:
        ranks = range(self._ranks)
        return self._briefly(lambda: [_read(self._store, _of(_ALIVE, rank)) for rank in ranks], [])

    def _briefly(self, act: Callable[[], T], default: T) -> T:
        results: list[T] = []

        def run() -> None:
            try:
                results.append(act())
            except RuntimeError:  # torch's DistError; the caller raises another error
                self._store_is_gone = True

        if not self._store_is_gone:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(ANSWER_S)
            self._store_is_gone = not results
        return results[0] if results else default


def _rings(store: Any, bell: str) -> bool:
    try:
        store.wait([bell], _A_DAY)
    except DistStoreError:  # only the time is up
        return False
    return True


def _of(key: str, rank: int) -> str:
    return f"{key}-{rank}"


def _read(store: Any, key: str) -> str:
    return cast("bytes", store.get(key)).decode() if store.check([key]) else ""


def _broken_in(stands: str) -> tuple[int, str]:
    work, _, reason = stands.partition(" ")
    return int(work or 0), reason
