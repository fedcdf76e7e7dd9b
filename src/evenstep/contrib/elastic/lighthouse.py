"""Lighthouse of torchft: a list of the processes that are alive, equal for all that ask.

It answers once everybody alive has asked, or the others were silent too long.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from threading import Event, Thread
from time import monotonic
from typing import Any, final

from evenstep.errors import LostRankError, MissingExtraError
from evenstep.parallel.rank_info import ElasticRank, this_process

HEARTBEAT_S = 0.1
SILENT_S = 2.0  # a process that has sent no heartbeat for so long is lost
_ANSWER_S = 5.0
_ERRORS = (RuntimeError, ValueError, TimeoutError)  # of torchft


def coordination() -> Any:
    if find_spec("torchft") is None:
        raise MissingExtraError("torchft", "torchft")
    os.environ.setdefault("RUST_LOG", "warn")  # read once, when it is imported
    return import_module("torchft.coordination")


@contextmanager
def lighthouse(timeout_s: float) -> Generator[str]:
    """Serve a lighthouse, which waits up to `timeout_s` for a process that is alive and does not ask; its address."""
    server: Any = coordination().LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=int(1000 * timeout_s),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * SILENT_S),
    )
    try:  # a machine's own name need not lead back to it
        yield f"http://localhost:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One process that has asked."""

    number: int
    name: str  # unique, also beside a process that takes the same place later
    tries: int  # number of groups that it has been in, or tried to form
    patient: bool  # prefers to wait for processes that have not come
    store: str  # address where the first process of a group lets the others rendezvous


@final
class Lighthouse:
    """One process's access to the lighthouse; alive from the first question until `close`."""

    def __init__(self, place: ElasticRank) -> None:
        self.place = place
        self.name = f"{place.number:06d}:{this_process()}:{monotonic()}"
        try:
            self._client = coordination().LighthouseClient(
                place.lighthouse, connect_timeout=timedelta(seconds=_ANSWER_S)
            )
        except _ERRORS as error:
            raise self._silent(error) from error
        self._ended = Event()
        self._beating: Thread | None = None

    def ask(self, *, update: int, tries: int, patient: bool, store: str, timeout_s: float) -> list[Peer]:
        """All processes that ask at the same time, by number; see `Peer`."""
        if self._beating is None:
            self._beating = Thread(target=self._beat, name="evenstep-heartbeat", daemon=True)
            self._beating.start()
        said = {"number": self.place.number, "tries": tries, "patient": patient}
        try:
            answer = self._client.quorum(
                replica_id=self.name,
                timeout=timedelta(seconds=timeout_s),
                address=socket.gethostname(),
                store_address=store,
                step=update,
                world_size=1,
                shrink_only=False,
                data=said,
            )
        except _ERRORS as error:
            raise self._silent(error) from error
        members = [Peer(name=one.replica_id, store=one.store_address, **one.data) for one in answer.participants]
        return sorted(members, key=lambda one: (one.number, one.name))

    def close(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                self._client.heartbeat(self.name)
            except _ERRORS:  # the next question raises if nobody answers
                self._ended.wait(1.0)

    def _silent(self, error: Exception) -> LostRankError:
        return LostRankError(
            f"the lighthouse at {self.place.lighthouse} gives no answer: {str(error).splitlines()[0]} "
            f"It runs in the launcher, or where `torchft_lighthouse` was started."
        )
