"""Counters of committed updates, and the updates whose verdict the host has not read."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import final

from evenstep.data import GlobalBatch
from evenstep.errors import LostRankError, clause
from evenstep.events import Bus, Incident, Storage, UpdateEvent
from evenstep.parallel import Group
from evenstep.precision import LossScale
from evenstep.train.aborts import AbortCauses
from evenstep.train.progress import Progress
from evenstep.train.update.outcome import Aborted, PendingUpdate, first_aborted
from evenstep.train.update.update import Update


@final
@dataclass(slots=True, kw_only=True)
class Ledger:
    """Counts updates as they are dispatched, and takes back those that were aborted.

    Attributes:
        progress: the counters after all dispatched updates.
    """

    core: Update
    causes: AbortCauses
    group: Group
    storage: Storage
    loss_scale: LossScale
    progress: Progress = field(default_factory=Progress)
    _pending: list[PendingUpdate] = field(default_factory=list[PendingUpdate])

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def add(self, pending: PendingUpdate) -> PendingUpdate:
        """Count a dispatched update."""
        self._pending.append(pending)
        self.progress = pending.before.committed(pending.batch, skipped_samples=pending.skipped_samples)
        self.loss_scale.committed()
        return pending

    def settle(self) -> Aborted | None:
        """Read the verdicts of all dispatched updates; gives the first that was aborted.

        After an abort the counters are those before it, and updates that were dispatched since were not applied.
        """
        updates, index = self._take()
        self.core.settle(None if index is None else updates[index].number)
        if index is None:
            return None
        first = updates[index]
        self.storage.discard_from(first.number)
        self._go_back_before(first)
        self.core.resume()
        since = tuple(one.batch for one in updates[index + 1 :])
        return Aborted(incident=self.causes.incident(first), pending=first, since=since)

    def events(self, bus: Bus, batch: GlobalBatch, *, data_s: float | None = None) -> AbstractContextManager[None]:
        """Events around the next update, whose batch took `data_s` seconds of waiting."""
        number, samples = self.progress.update + 1, self.progress.samples
        begin = UpdateEvent(update=number, num_microbatches=batch.num_microbatches, data_s=data_s)

        def end(error: BaseException | None) -> UpdateEvent:
            committed = error is None and self.progress.update >= number
            taken = self.progress.samples - samples if committed else batch.num_samples
            return replace(begin, data_s=None, committed=committed, num_samples=taken)

        return bus.span("update", lambda: begin, end)

    def skip(self, batch: GlobalBatch) -> None:
        """Count `batch` as taken without an update."""
        self.progress = self.progress.without(batch)

    def begin(self) -> None:
        """Before a pass over the data: nothing is pending, and buffers are as they are now."""
        self.core.require_whole()
        self._pending.clear()
        self.core.rollback.follow()

    def abandon(self) -> None:
        """Roll back uncommitted updates after an error."""
        updates, index = self._take()
        if index is not None:
            self._go_back_before(updates[index])
        self.core.abandon(None if index is None else updates[index].number)
        self.storage.discard_from(self.progress.update + 1)

    @contextmanager
    def together(self) -> Generator[None]:
        """Around what all ranks do together: an error inside is rolled back, and ends the other ranks' waiting."""
        self.group.go_on()
        try:
            yield
        except BaseException as raised:
            error = self.group.explained(raised)
            if not isinstance(error, LostRankError):
                self.group.fail(clause(error))
            self.abandon()
            if error is raised:
                raise
            raise error from raised

    def explain(self, aborted: Aborted) -> tuple[Incident, Exception]:
        """The incident with its cause, found by another run, and an error to raise; see `Engine.explain`."""
        return self.causes.ending(aborted.incident, aborted.pending)

    def _take(self) -> tuple[list[PendingUpdate], int | None]:
        updates = self._pending.copy()
        self._pending.clear()
        return updates, first_aborted(updates)

    def _go_back_before(self, update: PendingUpdate) -> None:
        self.progress = update.before
        self.loss_scale.load_state_dict(update.loss_scale)
        self.core.learning_rates.restore(update.rates)
