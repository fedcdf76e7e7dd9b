"""Runs a training loop on ranks that come and go.

`join` forms a group, `heal` shares the most advanced state, then training continues from the last committed update.
An interrupted update leaves no trace: its micro-batches keep their numbers on the remaining ranks.
"""

from collections.abc import Callable, Mapping
from typing import final

from evenstep.contrib.elastic.membership import Elastic
from evenstep.errors import EvenstepError, LostRankError
from evenstep.events import Incident, Json
from evenstep.train.loop import Loop
from evenstep.train.replica import Replica
from evenstep.train.requests import End


@final
class ElasticRun:
    """A trainer's loop on ranks that come and go."""

    def __init__(self, group: Elastic, loop: Loop, agree: Callable[[], None]) -> None:
        self._group = group
        self._replica = Replica(loop)
        self._agree = agree
        self._before: dict[str, int] = {}  # the members when the loop last ran

    def run(self) -> End:
        """Do what `Loop.run` does, as often as the group changes."""
        end: End | None = None
        while True:
            try:
                self._group.join(self._replica.update)
            except LostRankError:
                if end is not None:
                    return end  # so are the others, who have left: they knew it a moment earlier
                raise
            try:
                self._heal()
                end = self._replica.run()
                self._group.gather("done")  # somebody may need the last update again
            except LostRankError:
                self._replica.abandon()
            else:
                return end

    def _heal(self) -> None:
        before, update = self._same_state()
        self._replica.agree(self._group)
        self._agree()
        self._tell(before, update)

    def _same_state(self) -> tuple[Mapping[str, int], int]:
        group, mine = self._group, self._replica.fingerprint()
        told = group.gather((mine, self._before))
        everybody = [theirs for theirs, _ in told]
        source = max(range(group.ranks), key=lambda rank: (everybody[rank][0], -rank))
        most, _ = everybody[source]
        if most < 0:
            raise EvenstepError("no process that is left holds the state of an update; go on from the last checkpoint.")
        if any(theirs != everybody[source] for theirs in everybody):
            state = group.gather(self._replica.state_dict() if group.rank == source else None)[source]
            if mine != everybody[source]:
                self._replica.take(state)
        return told[source][1], most

    def _tell(self, before: Mapping[str, int], update: int) -> None:
        now = self._before = dict(self._group.members)
        lost = sorted(number for name, number in before.items() if name not in now)
        came = sorted(number for name, number in now.items() if before and name not in before)
        if not lost and not came:
            return
        what = [f"{_processes(lost)} lost"] if lost else []
        what += [f"{_processes(came)} there, with the state of the others"] if came else []
        message = f"{' and '.join(what)}: update {update + 1} is dealt over {len(now)} of {self._group.count}."
        details: dict[str, Json] = {"lost": [*lost], "came": [*came], "processes": [*sorted(now.values())]}
        kind = "lost_rank" if lost else "rank_came"
        self._replica.report(Incident(kind=kind, update=update, message=message, details=details))


def _processes(numbers: list[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"process {names} is" if len(numbers) == 1 else f"processes {names} are"
