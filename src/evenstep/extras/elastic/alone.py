"""How ranks that each step alone (`Local`) go on together after some were lost or have come.

Each holds parameters and an optimizer state that nobody else has, and θ, what they shared last, with all. So they can't
all take one state, as replicas do. Those that *go on* were in the last group of these processes, and bring each other
to one place:

    apply     who had computed an update when a rank was lost, and waited for all to say so, applies it if any other
              has; if none has, all do it anew
    share     who was kept from the last share takes what it has come to on one that has made it; if none has, those
              that go on make it now, over themselves alone
    settle    a mean on its way that has come to one of them is that of all; one that has come to none is
              computed anew, of what those that go on have sent
    take      everybody else takes θ, the outer momentum and all counters, and begins with a new optimizer's state

Nothing of this decides who is there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from evenstep.checkpoint import pack, unpack
from evenstep.errors import ArgumentError, EvenstepError
from evenstep.parallel import Group
from evenstep.parallel.shares import Shares
from evenstep.train.state import Tree
from evenstep.train.state.local_state import NEW

if TYPE_CHECKING:
    from evenstep.extras.elastic.membership import Elastic
    from evenstep.train.loop import Loop


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one process holds, as it tells the others.

    Args:
        name: nobody else's.
        update: how many it has committed; below 0 if what it holds is not the state of any.
        meetings: how many groups have come to one place, up to the last that it was in; 0 if it was in none.
        members: the numbers of those in that group, by name.
        is_in_doubt: see `Update.is_in_doubt`.
        shared_until: see `Shares`.
        of_others: for which ranks it has read what a checkpoint holds of each alone.
    """

    name: str
    update: int
    meetings: int
    members: Mapping[str, int]
    is_in_doubt: bool
    shared_until: int
    of_others: tuple[str, ...] = ()


def going_on(everybody: Sequence[Standing]) -> tuple[list[int], int]:
    """The ranks that go on with what they hold, and at which update; the others take it from the first of them.

    Those are the members of the newest group. A group that broke up before all knew that it had come to one place is
    one newer for some than for others, and has made no update. Who has read a later checkpoint goes on alone.

    Args:
        everybody: by rank.

    Raises:
        EvenstepError: nobody holds a state.

    >>> lost = Standing(name="a", update=7, meetings=2, members=dict(a=0, b=1, c=2), is_in_doubt=False, shared_until=6)
    >>> from dataclasses import replace
    >>> came = replace(lost, name="d", update=0, meetings=0, members={})
    >>> going_on([came, lost, replace(lost, name="c", update=6, is_in_doubt=True)])
    ([1, 2], 7)
    >>> going_on([came, replace(came, name="e", update=0)])  # they begin
    ([0], 0)
    """
    newest = max(everybody, key=lambda one: one.meetings)
    line = [
        rank
        for rank, one in enumerate(everybody)
        if newest.meetings and one.update >= 0 and one.meetings >= newest.meetings - 1 and one.name in newest.members
    ]
    most = max((everybody[rank].update for rank in line), default=-1)
    begins = max(range(len(everybody)), key=lambda rank: (everybody[rank].update, -rank))
    if not everybody[begins].meetings and everybody[begins].update > most:
        return [begins], everybody[begins].update
    check_held(most)
    at = {rank: everybody[rank].update + everybody[rank].is_in_doubt for rank in line}
    return [rank for rank in line if at[rank] >= most], most


def check_held(most: int) -> None:
    """Raise EvenstepError where the most updates that anybody holds the state of are none, which is below 0."""
    if most < 0:
        raise EvenstepError("no process that is left holds the state of an update; go on from the last checkpoint.")


@final
class Reunion:
    """Brings the ranks of a run to one place.

    Args:
        take: loads a state that another has given.

    Raises:
        ArgumentError: the optimizer can't begin anew by itself.
    """

    def __init__(self, loop: "Loop", group: "Elastic", reducer: Shares, take: Callable[[Any], None]) -> None:
        self._loop, self._group, self._reducer, self._take = loop, group, reducer, take
        self._local = loop.engine.parts.saved.local
        self._meetings, self._newest = 0, 0
        self._members: Mapping[str, int] = {}
        state = loop.engine.held_tensors()
        tells = [state["optimizer"], *(own for own in state.get("local", {}).get("own", {}).values())]
        if any("whole" in one.get("beside", {}) for one in tells):
            raise ArgumentError(
                f"a rank that comes begins with a new optimizer's state, but {type(loop.engine.optimizer).__name__} "
                f"gives its state in a form of its own, which nobody else can empty; give it torch's `state_dict`, "
                f"share by `ddp`, or let a lost rank stop the run."
            )

    def unite(self, update: int) -> tuple[Mapping[str, int], int]:
        """Bring all to one place; all call it together.

        Args:
            update: how many this process has committed; below 0 if what it holds is not the state of any.

        Returns:
            Who was there before, and the update that all are at.
        """
        engine, rank = self._loop.engine, self._group.rank
        mine = Standing(
            name=self._group.name,
            update=update,
            meetings=self._meetings,
            members=self._members,
            is_in_doubt=engine.core.is_in_doubt,
            shared_until=self._reducer.shared_until,
            of_others=tuple(self._local.of_others),
        )
        everybody = self._group.gather(mine)
        self._newest = max(one.meetings for one in everybody)
        ranks, update = going_on(everybody)
        if engine.core.is_in_doubt:
            if rank in ranks and everybody[rank].update < update:
                engine.carry_out()
                self._loop.settle()
            else:
                self._loop.abandon()
        self._share(everybody, ranks, update)
        if len(ranks) < self._group.ranks:
            self._give(everybody, ranks, update)
        return everybody[ranks[0]].members, update

    def united(self) -> None:
        """All have said that they are at one place."""
        self._meetings, self._members = self._newest + 1, dict(self._group.members)
        self._local.of_others = {}

    def _share(self, everybody: Sequence[Standing], ranks: Sequence[int], update: int) -> None:
        """Let all that go on have made the share of `update`, if one was due, and have what was on its way."""
        engine, reducer = self._loop.engine, self._reducer
        made = [rank for rank in ranks if everybody[rank].shared_until >= update]
        if made and len(made) < len(ranks):
            theirs = shared(self._group, reducer.last_share, made[0])
            if self._group.rank in set(ranks) - set(made):
                reducer.take_share(update, theirs)
                engine.reducers.follow(update)
                engine.core.begin()
        with self._group.only(ranks) as is_among:
            if is_among and not made:
                reducer.settle_means(before=update)
                engine.after_update(update)
            if is_among:
                reducer.settle_means(before=update + 1)

    def _give(self, everybody: Sequence[Standing], ranks: Sequence[int], update: int) -> None:
        """Let all others take what those that go on have in common, and what was read for each of them."""
        group, source = self._group, ranks[0]
        given: Tree | None = None
        if group.rank == source:
            given = self._loop.checkpointer.state.part()
            local = given.get("local")
            # until they have stepped alone, all have the same optimizer state
            if local and update > self._reducer.together_until:
                given = {**given, "local": {**local, "own": {str(source): NEW}}}
        state: Tree = shared(group, given, source)
        own = state.get("local", {}).get("own", {}).get(str(source))
        known = everybody[source].of_others
        for rank in range(group.ranks):
            if str(rank) in known:
                theirs = shared(group, self._local.of_others.get(str(rank)), source)
                own = theirs if rank == group.rank else own
        if group.rank in ranks:
            return
        if "local" in state:
            state = {**state, "local": {**state["local"], "ranks": group.ranks, "own": {str(group.rank): own}}}
        self._take(state)


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
