"""One process's copy of a run, for groups whose processes are lost and come back between two updates.

Such a run (`contrib.elastic`) needs no more of the loop than this: abandon an update, take another copy's state, and
go on.
"""

from typing import Any, final

from torch import Tensor

from evenstep.errors import ArgumentError
from evenstep.events import Incident
from evenstep.internals import unwrapped
from evenstep.parallel import Group
from evenstep.tensors import byte_sum
from evenstep.train.loop import Loop
from evenstep.train.requests import End
from evenstep.train.state import Tree


@final
class Replica:
    """The copy that `loop` trains.

    Raises:
        ArgumentError: this process holds only a part of the model, or its data can't be dealt to other ranks.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_whole = True
        if loop.engine.parts.execution.num_parts > 1:
            raise ArgumentError("ranks that may be lost must each hold the whole state; use `Ddp`.")
        if loop.feed.data.positions != "all":
            raise ArgumentError(
                "a stream can't be divided again among the ranks that are left; give a dataset with a length, or "
                "let a lost rank stop the run."
            )

    @property
    def update(self) -> int:
        return self._loop.engine.progress.update if self._is_whole else -1

    def fingerprint(self) -> tuple[int, list[int]]:
        """The update, and a checksum of each tensor of the model."""
        tensors = unwrapped(self._loop.engine.model).state_dict().values()
        return self.update, [int(byte_sum(one)) for one in tensors if isinstance(one, Tensor)]

    def run(self) -> End:
        """Make updates from the last committed one on, until the run is over or a process is lost."""
        return self._loop.run()

    def abandon(self) -> None:
        """Forget an update that was interrupted; a save that was broken off is requested again."""
        self._loop.abandon()
        self._is_whole = self._is_whole and self._loop.engine.parts.core.is_whole
        if self._loop.checkpointer.settle_alone():
            self._loop.requests.save = True

    def state_dict(self) -> Tree:
        """The whole state, without asking other processes."""
        return self._loop.checkpointer.state.state_dict(whole=True)

    def take(self, state: Any) -> None:
        """Load what `state_dict` gave on another process, and write the metrics that this process has missed."""
        engine, before = self._loop.engine, max(self.update, 0)
        self._loop.checkpointer.state.load_state_dict(state)
        engine.parts.core.rollback.follow()
        engine.parts.core.is_whole = self._is_whole = True
        history = [record for name in engine.storage.names() for record in engine.storage.history(name)]
        missed = sorted((one for one in history if one.update > before), key=lambda one: one.update)
        self._loop.reporter.writers.write(missed)

    def agree(self, group: Group) -> None:
        """Agree on what is evaluated, saved and checked; all ranks call it together."""
        evaluations, saves, check = self._loop.evaluator, self._loop.checkpointer, self._loop.engine.parts.check_loss
        storage = self._loop.engine.storage
        begun = self._loop.has_begun
        mine = (begun, evaluations.evaluated_at, saves.saved_at, saves.is_prepared, check.pending, storage.settled)
        have_begun, evaluated, saved, prepared, pending, settled = zip(*group.gather(mine), strict=True)
        self._loop.has_begun = any(have_begun)
        storage.follow(max(settled))
        evaluations.evaluated_at = {name: min(one.get(name, -1) for one in evaluated) for name in evaluations.sets}
        saves.saved_at = saved[0]
        saves.is_prepared = any(prepared)
        check.pending.intersection_update(*pending)

    def report(self, incident: Incident) -> None:
        self._loop.reporter.report(incident)
