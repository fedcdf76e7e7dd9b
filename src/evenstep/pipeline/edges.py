"""What enters and leaves the stages of one rank while a plan runs.

Room for a message is made one message ahead, so memory does not grow with the number of micro-batches.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from evenstep.errors import LostRankError
from evenstep.parallel.group import Group, Interrupted
from evenstep.pipeline.action import Action, Op
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.wire import Address, Wire

AHEAD = 1  # messages from one rank whose buffers wait before the plan has come to their place
_GRACE_S = 2.0  # a rank that fails notes why and then its connections break; the note may come a little later
_RECEIVED = {Op.RECEIVE_INPUT: "output", Op.RECEIVE_GRADIENT: "gradient"}
_SENT = {Op.SEND_OUTPUT: "output", Op.SEND_GRADIENT: "gradient"}


@final
class Edges:
    """The edges of one rank's stages.

    Attributes:
        wire: over which messages between ranks go.
    """

    def __init__(self, layout: Layout, group: Group, device: torch.device) -> None:
        self.wire = Wire(group, device)
        self._group = group
        self._rank_of = layout.rank_of
        self._ready: dict[Address, Any] = {}  # handed over, or received before it was asked for
        self._leaving: dict[Address, Any] = {}
        # by rank, in the order in which it sends: what it will send, and of that what there is room for
        self._coming: dict[int, deque[Address]] = {}
        self._begun: dict[int, deque[tuple[Address, Callable[[], Any]]]] = {}

    def begin(self, plan: Sequence[Action]) -> None:
        """A plan begins, on all ranks: make room for the first messages that it receives."""
        self.wire.begin()
        self._coming, self._begun = {}, {}
        for action in plan:
            if action.op in _RECEIVED:
                address = Address(_RECEIVED[action.op], action.peer, action.stage, action.microbatch)
                self._coming.setdefault(self._rank_of[action.peer], deque()).append(address)
        for rank in self._coming:
            for _ in range(AHEAD):
                self._make_room(rank)

    def forget(self) -> None:
        for held in (self._ready, self._leaving, self._coming, self._begun):
            held.clear()

    def take(self, address: Address) -> Any:
        """The tree that `address` names; waits for it if it comes from another rank."""
        rank = self._rank_of[address.source]
        if rank == self._rank_of[address.destination]:
            return self._ready.pop(address)
        while address not in self._ready:
            self._receive_next(rank)
        if address.kind == "gradient":  # so the output that it belongs to had arrived
            self.wire.answered(Address("output", address.destination, address.source, address.microbatch), rank)
        return self._ready.pop(address)

    def leave(self, address: Address, tree: Any) -> None:
        """`tree` is ready for the stage that `address` names: it is handed over, or sent by a later action."""
        here = self._rank_of[address.source] == self._rank_of[address.destination]
        (self._ready if here else self._leaving)[address] = tree

    def send(self, action: Action) -> None:
        """Begin to send what the action's stage has left for its peer."""
        address = Address(_SENT[action.op], action.stage, action.peer, action.microbatch)
        self.wire.send(address, self._leaving.pop(address), self._rank_of[action.peer])

    def receive(self, action: Action) -> None:
        """The plan has come to the next message from the rank of the action's peer: make room for one more."""
        self._make_room(self._rank_of[action.peer])

    def _make_room(self, rank: int) -> None:
        coming = self._coming[rank]
        if coming:
            begun = coming[0], self.wire.begin_receive(coming[0], rank)
            self._begun.setdefault(rank, deque()).append(begun)
            coming.popleft()

    def _receive_next(self, rank: int) -> None:
        address, received = self._begun[rank][0]
        try:
            self._ready[address] = received()
        except Interrupted:
            raise
        except LostRankError as error:
            raise LostRankError(f"{address} will not come: {self._reason() or error}") from error
        self._begun[rank].popleft()

    def _reason(self) -> str:
        until = time.monotonic() + _GRACE_S
        while not (reason := self._group.abort_reason()) and time.monotonic() < until:
            time.sleep(0.05)
        return reason
