"""What enters and leaves the stages of one rank while a plan runs.

Between two stages of this rank a tree of tensors is handed over as it is; between ranks it goes by wire, where sends
and receives are actions of the plan. It knows neither modules nor gradients.
"""

from collections.abc import Sequence
from typing import Any, final

import torch

from evenstep.parallel.group import Group
from evenstep.pipeline.action import Action, Op
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.wire import Address, Inbox, Wire

_RECEIVED = {Op.RECEIVE_INPUT: "output", Op.RECEIVE_GRADIENT: "gradient"}
_SENT = {Op.SEND_OUTPUT: "output", Op.SEND_GRADIENT: "gradient"}


@final
class Edges:
    """The edges of one rank's stages.

    Args:
        layout: of all stages.
        group: the pipeline's ranks.
        device: where received tensors are put.

    Attributes:
        wire: over which messages between ranks go.
    """

    def __init__(self, layout: Layout, group: Group, device: torch.device) -> None:
        self.wire = Wire(group, device)
        self._group = group
        self._rank_of = layout.rank_of
        self._inbox = Inbox(self.wire, group, {})
        self._here: dict[Address, Any] = {}
        self._leaving: dict[Address, Any] = {}

    def begin(self, plan: Sequence[Action]) -> None:
        """A plan begins, on all ranks: make room for the first messages that it receives."""
        self.wire.begin()
        self._inbox = Inbox(self.wire, self._group, self._coming(plan))

    def forget(self) -> None:
        """Drop what was not handed over or sent, after a plan that has failed."""
        self._here.clear()
        self._leaving.clear()
        self._inbox = Inbox(self.wire, self._group, {})

    def take(self, address: Address) -> Any:
        """The tree that `address` names; waits for it if it comes from another rank.

        Raises:
            EvenstepError: it will not come; the message says which rank failed, and why.
        """
        rank = self._rank_of[address.source]
        if rank == self._rank_of[address.destination]:
            return self._here.pop(address)
        tree = self._inbox.take(address, rank)
        self._answered(address, rank)
        return tree

    def leave(self, address: Address, tree: Any) -> None:
        """`tree` is ready for the stage that `address` names: it is handed over, or sent by a later action."""
        here = self._rank_of[address.source] == self._rank_of[address.destination]
        (self._here if here else self._leaving)[address] = tree

    def send(self, action: Action) -> None:
        """Begin to send what the action's stage has left for its peer."""
        address = Address(_SENT[action.op], action.stage, action.peer, action.microbatch)
        self.wire.send(address, self._leaving.pop(address), self._rank_of[action.peer])

    def receive(self, action: Action) -> None:
        """The plan has come to the next message from the rank of the action's peer: make room for one more."""
        self._inbox.allow(self._rank_of[action.peer])

    def _answered(self, address: Address, rank: int) -> None:
        """A gradient has come: the output that it belongs to had arrived."""
        if address.kind == "gradient":
            self.wire.answered(Address("output", address.destination, address.source, address.microbatch), rank)

    def _coming(self, plan: Sequence[Action]) -> dict[int, list[Address]]:
        """For each rank what comes from it, in order."""
        coming: dict[int, list[Address]] = {}
        for action in plan:
            if action.op in _RECEIVED:
                address = Address(_RECEIVED[action.op], action.peer, action.stage, action.microbatch)
                coming.setdefault(self._rank_of[action.peer], []).append(address)
        return coming
