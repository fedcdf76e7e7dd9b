"""Runs a training loop on ranks that come and go.

`join` forms a group, ranks take the most advanced state, then training continues from the last committed update.
An interrupted update leaves no trace: its micro-batches keep their numbers on the remaining ranks.
"""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from evenstep.contrib.elastic.membership import Elastic
from evenstep.errors import ArgumentError, EvenstepError, LostRankError
from evenstep.events import Incident, Json
from evenstep.internals import unwrapped
from evenstep.tensors import byte_sum
from evenstep.train.loop import Loop
from evenstep.train.progress import Result
from evenstep.train.state import Tree


@final
class ElasticRun:
    """A trainer's loop on ranks that come and go."""

    def __init__(self, group: Elastic, loop: Loop) -> None:
        self._group = group
        self._loop = loop
        self._is_whole = True
        self._before: dict[str, int] = {}  # the members when the loop last ran
        if loop.engine.parts.execution.num_parts > 1:
            raise ArgumentError("ranks that may be lost must each hold the whole state; use `Ddp`.")
        if loop.feed.data.positions != "all":
            raise ArgumentError(
                "a stream can't be divided again among the ranks that are left; give a dataset with a length, or "
                "let a lost rank stop the run."
            )

    @property
    def _update(self) -> int:
        return self._loop.engine.progress.update if self._is_whole else -1

    def run(self) -> Result:
        """Do what `Loop.run` does, as often as the group changes."""
        end: Result | None = None
        while True:
            try:
                self._group.join(self._update)
            except LostRankError:
                if end is not None:
                    return end  # so are the others, who have left: they knew it a moment earlier
                raise
            try:
                before, update = self._take_newest()
                self._agree_on_requests()
                self._loop.check_agreement()
                self._report(before, update)
                end = self._loop.run()
                self._group.gather("done")  # somebody may need the last update again
            except LostRankError:
                self._abandon()
            else:
                return end

    def _take_newest(self) -> tuple[Mapping[str, int], int]:
        group = self._group
        tensors = unwrapped(self._loop.engine.model).state_dict().values()
        mine = self._update, [int(byte_sum(one)) for one in tensors if isinstance(one, Tensor)]
        told = group.gather((mine, self._before))
        everybody = [theirs for theirs, _ in told]
        source = max(range(group.ranks), key=lambda rank: (everybody[rank][0], -rank))
        most, _ = everybody[source]
        if most < 0:
            raise EvenstepError("no process that is left holds the state of an update; go on from the last checkpoint.")
        if any(theirs != everybody[source] for theirs in everybody):
            run_state = self._loop.checkpointer.state
            state = group.gather(run_state.state_dict(whole=True) if group.rank == source else None)[source]
            if mine != everybody[source] and state is not None:
                self._take(state)
        return told[source][1], most

    def _take(self, state: Tree) -> None:
        engine, before = self._loop.engine, max(self._update, 0)
        self._loop.checkpointer.state.load_state_dict(state)
        engine.parts.core.rollback.buffers.restore(0.0)
        engine.parts.core.is_whole = self._is_whole = True
        history = [record for name in engine.storage.names() for record in engine.storage.history(name)]
        missed = sorted((one for one in history if one.update > before), key=lambda one: one.update)
        self._loop.reporter.writers.write(missed)

    def _agree_on_requests(self) -> None:
        loop, storage = self._loop, self._loop.engine.storage
        evaluations, saves, check = loop.evaluator, loop.checkpointer, loop.engine.parts.check_loss
        now = loop.has_begun, evaluations.evaluated_at, saves.saved_at, saves.is_prepared, check.pending
        everybody = self._group.gather((*now, storage.settled))
        have_begun, evaluated, saved, prepared, pending, settled = zip(*everybody, strict=True)
        loop.has_begun = any(have_begun)
        storage.follow(max(settled))
        evaluations.evaluated_at = {name: min(one.get(name, -1) for one in evaluated) for name in evaluations.sets}
        saves.saved_at = saved[0]
        saves.is_prepared = any(prepared)
        check.pending.intersection_update(*pending)

    def _abandon(self) -> None:
        self._loop.abandon()
        self._is_whole = self._is_whole and self._loop.engine.parts.core.is_whole
        if self._loop.checkpointer.settle_alone():
            self._loop.requests.save = True  # again, as the group broke it off

    def _report(self, before: Mapping[str, int], update: int) -> None:
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
        self._loop.reporter.report(Incident(kind=kind, update=update, message=message, details=details))


def _processes(numbers: list[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"process {names} is" if len(numbers) == 1 else f"processes {names} are"
