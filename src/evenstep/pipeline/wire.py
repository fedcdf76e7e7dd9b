"""Trees of tensors between pipeline ranks, and the edges of one rank's stages.

A message is a header, its form if that has changed, and the tensors; shapes may change with every micro-batch. Room for
a message is made one message ahead, so memory does not grow with the number of micro-batches.
"""

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from struct import Struct
from typing import Any, final

import torch
from torch import Tensor

from evenstep.errors import LostRankError
from evenstep.internals import pytree
from evenstep.parallel.group import Group, Interrupted
from evenstep.pipeline.action import Action, Op
from evenstep.pipeline.boundary import check_sendable, unsendable
from evenstep.pipeline.layout import Layout

AHEAD = 1  # messages from one rank whose buffers wait before the plan has come to their place
SENDING = 4  # messages to one rank that are on their way at once
_ALIGNED = 64  # bytes: each tensor lies where one of its own would
_SECOND = 1  # the channel of second pieces
_HEADER = Struct("6q16x")  # kind, source, destination, micro-batch, bytes of the form, bytes of the body with the form
_GRACE_S = 2.0  # between the end of a rank's connections and its note of why
_RECEIVED = {Op.RECEIVE_INPUT: "output", Op.RECEIVE_GRADIENT: "gradient"}
_SENT = {Op.SEND_OUTPUT: "output", Op.SEND_GRADIENT: "gradient"}
_KINDS = ("output", "gradient", "state", "prediction")


@final
@dataclass(frozen=True, slots=True)
class Address:
    """Which tree a message holds.

    Args:
        kind: "output" or "gradient"; "state" for what a checkpoint or a whole model gathers, "prediction" for what is
            collected.
        source: the stage that it comes from; of what is gathered or collected, the rank.
        destination: the stage, or rank, that it goes to.
        microbatch: global number; of a whole model, the place of the layer.
    """

    kind: str
    source: int
    destination: int
    microbatch: int

    @property
    def edge(self) -> tuple[str, int, int]:
        """The address without the micro-batch."""
        return self.kind, self.source, self.destination

    def __str__(self) -> str:
        return f"the {self.kind} from stage {self.source} to stage {self.destination} for micro-batch {self.microbatch}"


@final
class Wire:
    """What one rank sends and receives.

    Args:
        device: where received tensors are put.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sent_forms: dict[tuple[str, int, int], _Form] = {}
        self._known_forms: dict[tuple[str, int, int], _Form] = {}
        self._largest: dict[tuple[str, int, int], int] = {}
        self._room: dict[tuple[str, int, int], int] = {}
        self._sending: dict[int, dict[Address, list[Callable[[], None]]]] = {}

    def begin(self) -> None:
        """A run begins, on all ranks: from now on there is room for the largest messages so far, on both ends."""
        self._room = dict(self._largest)

    def reset(self) -> None:
        """Forget all messages, and what both ends know of them; all ranks do, when their connections are new."""
        for known in (self._sent_forms, self._known_forms, self._largest, self._room, self._sending):
            known.clear()

    def send(self, address: Address, tree: Any, rank: int) -> None:
        """Begin to send `tree`; its tensors are copied."""
        edge = address.edge
        leaves, structure = pytree.tree_flatten(tree)
        marks = [_mark(leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            check_sendable(tensor, address)
        # what is neither tensor nor None may change in place, or have an equality of its own
        plain = len(tensors) + sum(leaf is None for leaf in leaves) == len(leaves)
        known = plain and self._sent_forms.get(edge) == (marks, structure)
        form = b"" if known else _form(address, marks, structure)
        piece = _packed(address, form, tensors)
        self._sent_forms[edge] = marks, structure  # only now: memory may have run out before
        self._note(edge, len(piece) - _ALIGNED)
        if len(piece) - _ALIGNED <= self._room_on(address):
            waits = [self._group.begin_send(piece, rank)]
        else:
            head, body = piece[:_ALIGNED], piece[_ALIGNED:]
            waits = [self._group.begin_send(head, rank), self._group.begin_send(body, rank, _SECOND)]
        sending = self._sending.setdefault(rank, {})
        sending[address] = waits
        while len(sending) > SENDING:
            _finish(sending.pop(next(iter(sending))))

    def answered(self, address: Address, rank: int) -> None:
        _finish(self._sending.get(rank, {}).pop(address, []))

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for sending in self._sending.values():
            while sending:
                _finish(sending.popitem()[1])

    def begin_receive(self, address: Address, rank: int) -> Callable[[], Any]:
        """Make room for the next message of `rank`, which is this one; call the result to wait for its tree.

        Messages of one rank must be waited for in their order. Where memory runs out, the result may be called again.
        """
        piece = torch.empty(_ALIGNED + self._room_on(address), dtype=torch.uint8)
        body = piece[_ALIGNED:]
        wait = self._group.begin_receive(piece, rank)
        here = False

        def received() -> Any:
            nonlocal body, here
            if not here:
                wait()
            here = True
            head = piece[:_ALIGNED].numpy().tobytes()
            kind, source, destination, microbatch, form_bytes, body_bytes = _HEADER.unpack(head)
            came = Address(_KINDS[kind], source, destination, microbatch)
            assert came == address, f"{came} came in place of {address}"
            if body_bytes > len(body):
                second = torch.empty(body_bytes, dtype=torch.uint8)
                self._group.begin_receive(second, rank, _SECOND)()
                body = second
            self._note(address.edge, body_bytes)
            return self._unpacked(address.edge, form_bytes, body)

        return received

    def receive(self, address: Address, rank: int) -> Any:
        return self.begin_receive(address, rank)()

    def _note(self, edge: tuple[str, int, int], num_bytes: int) -> None:
        self._largest[edge] = max(self._largest.get(edge, 0), num_bytes)

    def _room_on(self, address: Address) -> int:
        return self._room.get(address.edge, 0) if address.kind != "state" else 0

    def _unpacked(self, edge: tuple[str, int, int], form_bytes: int, body: Tensor) -> Any:
        if form_bytes:
            self._known_forms[edge] = pytree.tree_flatten(pickle.loads(body[:form_bytes].numpy().tobytes()))
        marks, structure = self._known_forms[edge]
        begin, leaves = _aligned(form_bytes), []
        for mark in marks:
            if isinstance(mark, _Tensor):
                end = begin + prod(mark.shape) * mark.dtype.itemsize
                tensor = body[begin:end].view(mark.dtype).view(mark.shape).to(self._device)
                # of a leaf that nobody has computed anything from yet, so that nothing has to be copied
                leaves.append(tensor.requires_grad_(mark.requires_grad))
                begin = _aligned(end)
            else:
                leaves.append(mark)
        return pytree.tree_unflatten(leaves, structure)


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


@final
@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


_Form = tuple[list[Any], pytree.TreeSpec]  # for each tensor what it is, for all other leaves themselves; the structure


def _form(address: Address, marks: Sequence[Any], structure: pytree.TreeSpec) -> bytes:
    try:
        return pickle.dumps(pytree.tree_unflatten(marks, structure))
    except Exception as error:
        raise unsendable(address, error) from error


def _packed(address: Address, form: bytes, tensors: Sequence[Tensor]) -> Tensor:
    body_bytes = _aligned(len(form)) + sum(_aligned(tensor.nbytes) for tensor in tensors)
    numbers = _KINDS.index(address.kind), address.source, address.destination, address.microbatch
    head = _HEADER.pack(*numbers, len(form), body_bytes) + form
    head += bytes(-len(head) % _ALIGNED)
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    for tensor in tensors:
        packed = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # a column of a matrix would be flat already, but not packed
        parts.append(packed.as_strided((packed.numel(),), (1,)).view(torch.uint8))
        if tensor.nbytes % _ALIGNED:
            parts.append(torch.empty(-tensor.nbytes % _ALIGNED, dtype=torch.uint8))
    return torch.cat(parts)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _finish(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _Tensor(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf
