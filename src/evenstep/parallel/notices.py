"""What ranks tell each other beside their collectives: who has failed and why, and who is still there.

It goes through the store of their rendezvous, which a rank can reach while others wait. A failing rank leaves a notice
before it ends, so that nobody has to guess from a closed connection. One that has waited too long calls the roll: who
waits as well answers, and who does not answer is missing. Nothing here waits for long, even if the store is gone.
"""

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, TypeVar, cast, final

T = TypeVar("T")
ANSWER_S = 3.0
_FAILED, _MESSAGE, _ROLL = "failed", "message", "roll"


@final
class Notices:
    """One rank's access to the notices.

    Args:
        store: a `torch.distributed.Store` that only these ranks use.
        rank: whose.
        ranks: how many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._answered = False

    def post(self, message: str) -> None:
        """Say that this rank fails, unless another has said so before."""

        def act() -> None:
            if self._store.add(_FAILED, 1) == 1:
                self._store.set(_MESSAGE, message)

        _briefly(act, None)

    def failure(self) -> str:
        """What the first failing rank has said, or ""."""
        return _briefly(lambda: self._read(_MESSAGE), "")

    def answer(self) -> None:
        """If somebody calls the roll, say once that this rank is there."""

        def act() -> bool:
            if self._store.check([_ROLL]):
                self._store.set(f"here-{self._rank}", "waiting")
                return True
            return False

        self._answered = self._answered or _briefly(act, default=False)

    def missing(self) -> list[int] | None:
        """Call the roll: the ranks that did not answer within a few seconds; None if the store can't be reached."""
        if not _briefly(self._call, default=False):
            return None
        until = monotonic() + ANSWER_S
        absent = list(range(self._ranks))
        while absent and monotonic() < until:
            sleep(0.1)
            absent = [rank for rank in absent if not _briefly(lambda rank=rank: self._is_here(rank), default=False)]
        return absent

    def _call(self) -> bool:
        self._store.set(_ROLL, "who is there?")
        self._store.set(f"here-{self._rank}", "waiting")
        return True

    def _is_here(self, rank: int) -> bool:
        return bool(self._store.check([f"here-{rank}"]))

    def _read(self, key: str) -> str:
        return cast("bytes", self._store.get(key)).decode() if self._store.check([key]) else ""


@final
class Unnoticed:
    """No notices: where whoever is lost is told by others, and nobody should wait to find out."""

    def post(self, message: str) -> None: ...

    def failure(self) -> str:
        """Always ""."""
        return ""

    def answer(self) -> None: ...

    def missing(self) -> list[int]:
        """Nobody is looked for."""
        return []


def _briefly(act: Callable[[], T], default: T) -> T:
    """What `act` gives; `default` if it fails or takes too long: the rank that keeps the store may be the lost one."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(act())
        except Exception:  # noqa: BLE001 - the store is gone with its rank; the caller has an error of its own to raise
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return results[0] if results else default
