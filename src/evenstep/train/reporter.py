"""Carries what went wrong on any rank to everybody who should know: hooks, writers, and files of the run folder.

A rank's own incidents reach its own hooks and the folder `incidents` at once, and the first rank, which alone has
writers, together with the next metrics. With them go the seconds that each rank was busy, which tell who holds up the
others, and how finely each cuts its micro-batches. It decides nothing.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, final

from evenstep.errors import LostRankError
from evenstep.events import Bus, Incident, IncidentFiles, Record, Writers
from evenstep.parallel import Group
from evenstep.train.cuts import Cuts
from evenstep.train.stragglers import Stragglers


@final
class Reports:
    """The incidents of one rank, on their way.

    Args:
        bus: of this rank's hooks.
        writers: of the run, on the first rank; none on others.
        files: where each incident gets a file.
        group: the ranks.
        cuts: of this rank.
        busy_s: gives the seconds per update that this rank was busy since it was last asked.

    Attributes:
        limits: of the ranks' cuts, by rank, as of the last exchange.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        writers: Writers,
        files: IncidentFiles,
        group: Group,
        cuts: Cuts,
        busy_s: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._writers = writers
        self._files = files
        self._group = group
        self._cuts = cuts
        self._busy_s = busy_s
        self._untold: list[Incident] = []
        self._stragglers = Stragglers()
        self.update = 0
        self.limits: list[int | None] = [cuts.limit] * group.ranks

    def report(self, incident: Incident) -> None:
        """Tell everybody on this rank at once, and the first rank's writers when they next meet."""
        if incident.rank == self._group.rank or self._group.rank == 0:
            self._files.write(incident)
        if self._group.rank == 0:
            self._writers.event("incident", incident)
        elif incident.rank is not None:
            self._untold.append(incident)
        self._bus.emit("on_incident", incident)

    def changed(self, said: Sequence[str], update: int) -> None:
        """Say in what a run that goes on from `update` differs from the one that was saved."""
        if said and self._group.rank == 0:
            message = f"the run goes on with other parts than it was saved with: {'; '.join(said)}."
            self.report(Incident(kind="resumed", update=update, message=message, details={"changed": list(said)}))

    def write(self, records: Sequence[Record]) -> None:
        """Hand metrics to the writers."""
        self._writers.write(records)

    def gather(self, pairs: Any) -> list[Any]:
        """Everybody's `pairs`, by rank; all that is untold is told on the way."""
        told, self._untold = self._untold, []
        everybody = self._group.gather((pairs, told, self._busy_s(), self._cuts.limit))
        self.limits = [limit for _, _, _, limit in everybody]
        if self._group.rank == 0:
            for _, incidents, _, _ in everybody[1:]:
                for incident in incidents:
                    self._writers.event("incident", incident)
                    self._bus.emit("on_incident", incident)
        for incident in self._stragglers.found([busy for _, _, busy, _ in everybody], self.update):
            self.report(incident)
        return [theirs for theirs, _, _, _ in everybody]


def failed(error: BaseException, group: Group, update: int) -> Incident:
    """The error that ends a run on this rank, as an incident: with the last collectives, if others are waited for."""
    lost = isinstance(error, LostRankError)
    return Incident(
        kind="lost_rank" if lost else "failed",
        update=update,
        message=f"{type(error).__name__}: {error}",
        details={"collectives": list(group.recorded())} if group.ranks > 1 else {},
        rank=group.rank,
        traceback="".join(traceback.format_exception(error)),
    )
