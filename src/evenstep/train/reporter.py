"""Carries incidents and metrics of all ranks to hooks, writers, and files of the run folder."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast, final

from evenstep.data import GlobalBatch
from evenstep.events import Bus, Incident, IncidentFiles, Record, Storage, Writer, Writers
from evenstep.events.hooks.measures import only_largest_peaks
from evenstep.parallel import Group


@final
class Reporter:
    """Incidents and metrics of one rank.

    Incidents reach this rank's hooks and files at once, and the first rank, which alone has writers, with the metrics.

    Args:
        logs: incidents go to Python's logger, as there are no writers.

    Attributes:
        bus: of the hooks that are told of incidents.
    """

    def __init__(self, *, files: IncidentFiles, group: Group, writers: Sequence[Writer], logs: bool) -> None:
        self._files = files
        self._group = group
        self.bus = Bus((), cast("Any", None))
        self.writers = Writers(writers if group.rank == 0 else (), report=self.report)
        self._logs = logs
        self._untold: list[Incident] = []

    def say(self, kind: str, update: int, message: str, **more: Any) -> None:
        """Report an incident."""
        self.report(Incident(kind=kind, update=update, message=message, **more))

    def report(self, incident: Incident) -> None:
        if incident.rank == self._group.rank or self._group.rank == 0:
            self._files.write(incident)
        if self._group.rank == 0:
            self._write(incident)
        elif incident.rank == self._group.rank:
            self._untold.append(incident)
        self.bus.tell(incident)

    def _write(self, incident: Incident) -> None:
        self.writers.event("incident", incident)
        if self._logs and incident.kind != "failed":  # which is raised
            logging.getLogger("evenstep").warning(incident.message)

    def settle(self, storage: Storage) -> list[Record]:
        """Hand all pending metrics of all ranks to the writers; all ranks call it together."""
        records = storage.settle(self._exchange)
        self.writers.write(records)
        for one in storage.take_shown():
            self.writers.event("shown", one)
        return records

    def _exchange(self, pairs: Any) -> list[Any]:
        told, self._untold = self._untold, []
        everybody = self._group.gather((pairs, told))
        if self._group.rank == 0:
            for _, incidents in everybody[1:]:
                for incident in incidents:
                    self._write(incident)
                    self.bus.tell(incident)
        return only_largest_peaks([theirs for theirs, _ in everybody])


def report_faults(report: Callable[[Incident], None], batch: GlobalBatch, update: int, rank: int) -> None:
    """Report the unreadable samples of a batch."""
    for fault in batch.faults:
        report(
            Incident(
                kind="loader",
                update=update,
                message=fault.message,
                details={"skipped_samples": fault.num_skipped},
                rank=rank,
                samples=tuple(fault.samples),
                traceback=fault.details,
            )
        )
