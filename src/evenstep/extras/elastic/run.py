"""The run of ranks that come and go: begun anew from the last committed update whenever they have changed.

    join         the processes that are there form a group; each has a new rank
    heal         who holds something else takes the state of the one that has committed most
    work         as ever, from the last committed update on
    give up      whatever a lost process, or one that has come, has interrupted

An interrupted update leaves no trace, and its global batch is dealt anew over those that are left, with the numbers of
its micro-batches; so it is the same update. Which processes are there is the group's to find out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from evenstep.checkpoint import pack, unpack
from evenstep.errors import ArgumentError, EvenstepError, LostRankError
from evenstep.events import Incident, Json
from evenstep.internals import unwrapped
from evenstep.parallel import Group
from evenstep.parallel.replicas import bits
from evenstep.train.loop import Loop
from evenstep.train.requests import End, GoBack

if TYPE_CHECKING:
    from evenstep.extras.elastic.membership import Elastic


@final
@dataclass(slots=True, kw_only=True)
class ElasticRun:
    """A trainer's loop on ranks that come and go.

    Args:
        group: of the ranks that are there.
        agree: raises unless all ranks that are there train the same.

    Raises:
        ArgumentError: the ranks share a model, or the data can't be dealt anew.
    """

    group: "Elastic"
    loop: Loop
    agree: Callable[[], None]
    _is_whole: bool = True  # whether this process holds the state of an update
    _before: dict[str, int] = field(default_factory=dict[str, int])  # the members when the loop last ran

    def __post_init__(self) -> None:
        engine = self.loop.engine
        if engine.parts.execution.part_held[1] > 1:
            raise ArgumentError("ranks that may be lost must each hold the whole state; use `Ddp` or `Ordered`.")
        if not self.loop.feed.data.knows_length:
            raise ArgumentError(
                "the data of ranks that may be lost must be dealt anew over those that are left, which a stream can't; "
                "give a dataset with a length, or let a lost rank stop the run."
            )

    def run(self) -> End:
        """Do what `Loop.run` does, as often as the group changes."""
        end: End | None = None
        while True:
            try:
                self.group.join(self._update)
            except LostRankError:
                if end is not None:
                    return end  # so are the others, who have left: they knew it a moment earlier
                raise
            try:
                self._heal()
                end = self.loop.run()
                self.group.gather("done")  # somebody may need the last update again
            except LostRankError:
                self._give_up()
            else:
                return end

    @property
    def _update(self) -> int:
        return self.loop.engine.progress.update if self._is_whole else -1

    def _give_up(self) -> None:
        self.loop.abandon()
        self._is_whole = self._is_whole and self.loop.engine.core.is_whole
        if self.loop.checkpointer.settle_alone():
            self.loop.requests.save = True  # of those that are left, as soon as they are together

    def _heal(self) -> None:
        """Bring all to one place, and do what was still to be done there."""
        before, update = self._same_state()
        self._agree_on_what_is_done()
        self.agree()
        self._tell(before, update)
        if update:
            leave = self.loop.act()  # what was wanted at that update may not have been done
            self.loop.requests.go_back = leave if isinstance(leave, GoBack) else None

    def _same_state(self) -> tuple[Mapping[str, int], int]:
        """Who does not hold what the one with the most updates holds takes its state.

        Returns:
            Who was there when that one last ran, and the update that all are at.
        """
        engine, group = self.loop.engine, self.group
        holds = unwrapped(engine.model).state_dict().values()
        mine = (self._update, [int(bits(one)) for one in holds if isinstance(one, Tensor)])
        told = group.gather((mine, self._before))
        everybody = [theirs for theirs, _ in told]
        source = max(range(group.ranks), key=lambda rank: (everybody[rank][0], -rank))
        most, _ = everybody[source]
        if most < 0:
            raise EvenstepError("no process that is left holds the state of an update; go on from the last checkpoint.")
        if any(theirs != everybody[source] for theirs in everybody):
            whole = self.loop.checkpointer.state.state_dict(whole=True) if group.rank == source else None
            state = shared(group, whole, source)
            if mine != everybody[source]:
                self._take(state)
        return told[source][1], most

    def _take(self, state: Any) -> None:
        engine, before = self.loop.engine, max(self._update, 0)
        self.loop.checkpointer.state.load_state_dict(state)
        engine.core.begin()
        engine.core.is_whole = self._is_whole = True
        # the others' history holds what this process would have written, had it been there
        history = [record for name in engine.storage.names() for record in engine.storage.history(name)]
        self.loop.reporter.writers.write(
            sorted((one for one in history if one.update > before), key=lambda one: one.update)
        )

    def _agree_on_what_is_done(self) -> None:
        """Take for evaluated, saved and looked at what the others have: processes that have come know nothing of it."""
        evaluations, saves, check = self.loop.evaluator, self.loop.checkpointer, self.loop.engine.parts.check_loss
        saved = saves.saved_at, saves.is_prepared
        storage = self.loop.engine.storage
        told = self.group.gather((evaluations.evaluated_at, saved, check.pending, storage.settled))
        storage.follow(max(settled for *_, settled in told))
        evaluated = [theirs for theirs, *_ in told]
        evaluations.evaluated_at = {name: min(one.get(name, -1) for one in evaluated) for name in evaluations.sets}
        saves.saved_at = told[0][1][0]
        saves.is_prepared = any(is_prepared for _, (_, is_prepared), *_ in told)
        for _, _, pending, _ in told:
            check.pending &= pending

    def _tell(self, before: Mapping[str, int], update: int) -> None:
        now = self._before = dict(self.group.members)
        lost = sorted(number for name, number in before.items() if name not in now)
        came = sorted(number for name, number in now.items() if before and name not in before)
        if not lost and not came:
            return
        what = [f"{_processes(lost)} lost"] if lost else []
        what += [f"{_processes(came)} there, with the state of the others"] if came else []
        message = f"{' and '.join(what)}: update {update + 1} is dealt over {len(now)} of {self.group.count}."
        details: dict[str, Json] = {"lost": [*lost], "came": [*came], "processes": [*sorted(now.values())]}
        self.loop.reporter.report(
            Incident(kind="lost_rank" if lost else "rank_came", update=update, message=message, details=details)
        )


def _processes(numbers: list[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"process {names} is" if len(numbers) == 1 else f"processes {names} are"


def shared(group: Group, tree: Any, source: int) -> Any:
    """The tree of tensors that `source` has, on every rank: they are sent one by one.

    >>> shared(Group(), {"a": [torch.ones(2), "b"]}, 0)
    {'a': [tensor([1., 1.]), 'b']}
    """
    tensors, skeleton = pack(tree, "state") if group.rank == source else ({}, None)
    forms = [(name, one.shape, one.dtype) for name, one in tensors.items()]
    skeleton, forms = group.gather((skeleton, forms))[source]
    for name, shape, dtype in forms:
        whole = tensors[name] if group.rank == source else torch.empty(shape, dtype=dtype)
        flat = whole.contiguous().reshape(-1)
        if flat.numel():
            group.broadcast([flat.view(torch.uint8)], source)
        tensors[name] = flat.view(shape)
    return unpack(skeleton, tensors, "state")
