"""Trees of tensors between pipeline ranks, and the edges of one rank's stages.

A message is a header, its form if that has changed, and the tensors. On hosts all of it is one piece, for which room is
made one message ahead. Between accelerators the tensors go by themselves, over the devices' backend.
"""

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from struct import Struct
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from evenstep.errors import LostRankError, TaskError
from evenstep.internals import pytree
from evenstep.parallel.group import Group, Interrupted
from evenstep.pipeline.action import Action, Layout, Op

AHEAD = 1  # messages from one rank whose buffers wait before the plan has come to their place
SENDING = 4  # messages to one rank that are on their way at once
_ALIGNED = 64  # bytes: alignment of each tensor
_SECOND = 1  # the channel of second pieces
_HEADER = Struct("6q16x")  # kind, source, destination, micro-batch, bytes of the form, bytes of the body with the form
_GRACE_S = 2.0  # between the end of a rank's connections and its note of why
_COMPARABLE = (Tensor, nn.Parameter, bool, int, str, type(None))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray, Enum, torch.Size, torch.dtype, torch.device)
_KINDS = ("output", "gradient", "state", "prediction")
_KIND = {
    Op.RECEIVE_INPUT: "output",
    Op.RECEIVE_GRADIENT: "gradient",
    Op.SEND_OUTPUT: "output",
    Op.SEND_GRADIENT: "gradient",
}


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def detached(tree: Any, name: object) -> Any:
    """The same values as leaves of a new graph; `name` is for errors, such as "the output of stage 0"."""

    def leaf(value: Any) -> Any:
        check_sendable(value, name)
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return pytree.tree_map(leaf, tree, is_leaf=lambda value: isinstance(value, PackedSequence))


def check_sendable(leaf: Any, name: object) -> None:
    """Raise TaskError for a leaf of a tree that could hide a gradient from another stage."""
    if isinstance(leaf, Tensor):
        fits = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided and not leaf.is_nested
    else:
        fits = isinstance(leaf, _PLAIN)
    if not fits:
        raise TaskError(
            f"{name} holds a {type(leaf).__name__}, which can't go to another stage; give dense tensors and plain "
            f"values in tuples, lists, dicts, NamedTuples or dataclasses of `torch.export.register_dataclass`."
        )


@final
@dataclass(frozen=True, slots=True)
class Address:
    """Name of a message.

    Args:
        kind: "output" or "gradient" between stages, "state" of a checkpoint, or "prediction".
        source: stage that it comes from; rank for a state or prediction.
        destination: stage or rank that it goes to.
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
    """Messages of one rank; received tensors are on `device`.

    Args:
        by_device: True sends tensors between stages over the backend of their device; by default on accelerators.
    """

    def __init__(self, group: Group, device: torch.device, *, by_device: bool | None = None) -> None:
        self._group = group
        self._device = device
        self.by_device = device.type != "cpu" if by_device is None else by_device
        self._sent_forms: dict[tuple[str, int, int], Any] = {}
        self._known_forms: dict[tuple[str, int, int], _Form] = {}
        self._largest: dict[tuple[str, int, int], int] = {}
        self._room: dict[tuple[str, int, int], int] = {}
        self._sending: dict[int, dict[Address, list[Callable[[], None]]]] = {}

    def begin(self) -> None:
        """A plan begins, on all ranks: from now on there is room for the largest messages so far, on both ends."""
        self._room = dict(self._largest)

    def reset(self) -> None:
        """Forget all messages and forms. All ranks do, when their connections are new."""
        for known in (self._sent_forms, self._known_forms, self._largest, self._room, self._sending):
            known.clear()

    def send(self, address: Address, tree: Any, rank: int) -> None:
        """Begin to send `tree`; tensors of hosts are copied."""
        edge = address.edge
        leaves, structure = pytree.tree_flatten(tree)
        marks = [_mark(leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            check_sendable(tensor, address)
        kinds = list(map(type, leaves))  # True is not 1
        # other leaves may change in place or define their own equality
        is_plain = all(kind in _COMPARABLE for kind in kinds)
        is_known = is_plain and self._sent_forms.get(edge) == (marks, kinds, structure)
        form = b"" if is_known else pickle.dumps(pytree.tree_unflatten(marks, structure))
        device = self._device if self._tensors_apart(address) else torch.device("cpu")
        parts = [_bytes_of(tensor, device) for tensor in tensors]
        apart = parts if self._tensors_apart(address) else []
        piece = _packed(address, form, [] if apart else parts)
        self._sent_forms[edge] = marks, kinds, structure  # only now: memory may have run out before
        self._note(edge, len(piece) - _ALIGNED)
        if len(piece) - _ALIGNED <= self._room_for(address):
            waits = [self._group.begin_send(piece, rank)]
        else:
            head, body = piece[:_ALIGNED], piece[_ALIGNED:]
            waits = [self._group.begin_send(head, rank), self._group.begin_send(body, rank, _SECOND)]
        waits += [self._group.begin_send(part, rank) for part in apart if part.numel()]
        sending = self._sending.setdefault(rank, {})
        sending[address] = waits
        while len(sending) > SENDING:
            _finish(sending.pop(next(iter(sending))))

    def acknowledge(self, address: Address, rank: int) -> None:
        """Forget a message that has arrived, since `rank` has answered it."""
        _finish(self._sending.get(rank, {}).pop(address, []))

    def flush(self) -> None:
        """Wait until all messages have left."""
        for sending in self._sending.values():
            while sending:
                _finish(sending.popitem()[1])

    def begin_receive(self, address: Address, rank: int) -> "Incoming":
        """Make room for the next message of `rank`, which must be `address`."""
        return Incoming(self, self._group, address, rank, self._room_for(address))

    def receive(self, address: Address, rank: int) -> Any:
        return self.begin_receive(address, rank).tree()

    def _note(self, edge: tuple[str, int, int], num_bytes: int) -> None:
        self._largest[edge] = max(self._largest.get(edge, 0), num_bytes)

    def _room_for(self, address: Address) -> int:
        return self._room.get(address.edge, 0) if address.kind != "state" else 0

    def _tensors_apart(self, address: Address) -> bool:
        return self.by_device and address.kind in ("output", "gradient")

    def begin_tree(self, address: Address, form_bytes: int, body: Tensor, rank: int) -> "_Begun":
        """Tree of a message, whose tensors may still be on their way."""
        self._note(address.edge, len(body))
        if form_bytes:
            self._known_forms[address.edge] = pytree.tree_flatten(pickle.loads(body[:form_bytes].numpy().tobytes()))
        marks, structure = self._known_forms[address.edge]
        apart = self._tensors_apart(address)
        tensors = (mark for mark in marks if isinstance(mark, _Tensor))
        if apart:
            made = [torch.empty(mark.shape, dtype=mark.dtype, device=self._device) for mark in tensors]
        else:
            made = _unpacked(body[_aligned(form_bytes) :], tensors, self._device)
        # only now: memory may have run out before
        flat = [tensor.view(-1).view(torch.uint8) for tensor in made if apart and tensor.numel()]
        waits = [self._group.begin_receive(part, rank) for part in flat]
        remaining = iter(made)
        # tensors are still leaves, so nothing is copied
        leaves = [
            next(remaining).requires_grad_(mark.requires_grad) if isinstance(mark, _Tensor) else mark for mark in marks
        ]
        return pytree.tree_unflatten(leaves, structure), waits


@final
class Incoming:
    """A message for which there is room. Messages of one rank must be read in their order."""

    def __init__(self, wire: Wire, group: Group, address: Address, rank: int, room: int) -> None:
        self._wire = wire
        self._group = group
        self._address = address
        self._rank = rank
        self._piece = torch.empty(_ALIGNED + room, dtype=torch.uint8)
        self._wait: Callable[[], None] | None = group.begin_receive(self._piece, rank)
        self._body: Tensor | None = None
        self._begun: _Begun | None = None

    def read(self) -> None:
        """Wait for the host's part; tensors of devices are on their way. May be called again if memory ran out."""
        if self._begun is not None:
            return
        if self._wait is not None:
            self._wait()
            self._wait = None
        kind, source, destination, microbatch, form_bytes, body_bytes = _HEADER.unpack(
            self._piece[:_ALIGNED].numpy().tobytes()
        )
        came = Address(_KINDS[kind], source, destination, microbatch)
        assert came == self._address, f"{came} came in place of {self._address}"
        if self._body is None:
            self._body = self._piece[_ALIGNED : _ALIGNED + body_bytes]
            if len(self._body) < body_bytes:
                second = torch.empty(body_bytes, dtype=torch.uint8)
                self._group.begin_receive(second, self._rank, _SECOND)()
                self._body = second
        self._begun = self._wire.begin_tree(self._address, form_bytes, self._body, self._rank)

    def tree(self) -> Any:
        """The tree, with all of its tensors."""
        self.read()
        assert self._begun is not None
        tree, waits = self._begun
        _finish(waits)
        return tree


@final
class Edges:
    """The edges of one rank's stages."""

    def __init__(self, layout: Layout, group: Group, device: torch.device) -> None:
        self.wire = Wire(group, device)
        self._group = group
        self._rank_of = layout.rank_of
        self._handed: dict[Address, Any] = {}  # from a stage of this rank
        self._leaving: dict[Address, Any] = {}
        self._read: dict[Address, Incoming] = {}
        # by rank, in the order in which it sends: messages to come, and those with room
        self._coming: dict[int, deque[Address]] = {}
        self._begun: dict[int, deque[tuple[Address, Incoming]]] = {}

    def begin(self, plan: Sequence[Action]) -> None:
        """A plan begins: make room for the first messages that it receives."""
        self.wire.begin()
        self._coming, self._begun = {}, {}
        for action in plan:
            if action.op in (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT):
                address = Address(_KIND[action.op], action.peer, action.stage, action.microbatch)
                self._coming.setdefault(self._rank_of[action.peer], deque()).append(address)
        for rank in self._coming:
            for _ in range(AHEAD):
                self._make_room(rank)

    def forget(self) -> None:
        for held in (self._handed, self._leaving, self._read, self._coming, self._begun):
            held.clear()

    def get(self, address: Address) -> Any:
        """The tree of this address; waits for it if it comes from another rank."""
        rank = self._rank_of[address.source]
        if rank == self._rank_of[address.destination]:
            return self._handed.pop(address)
        while address not in self._read:
            self._read_next(rank)
        if address.kind == "gradient":  # so the output that it belongs to had arrived
            self.wire.acknowledge(Address("output", address.destination, address.source, address.microbatch), rank)
        return self._read.pop(address).tree()

    def put(self, address: Address, tree: Any) -> None:
        """Hand a tree to a stage of this rank, or keep it until an action sends it."""
        here = self._rank_of[address.source] == self._rank_of[address.destination]
        (self._handed if here else self._leaving)[address] = tree

    def send(self, action: Action) -> None:
        address = Address(_KIND[action.op], action.stage, action.peer, action.microbatch)
        self.wire.send(address, self._leaving.pop(address), self._rank_of[action.peer])

    def receive(self, action: Action) -> None:
        """Make room for one more message from the rank of the action's peer.

        On devices both ends begin their transfers in one order, that of the plan: a message is read now.
        """
        rank = self._rank_of[action.peer]
        self._make_room(rank)
        if self.wire.by_device:
            address = Address(_KIND[action.op], action.peer, action.stage, action.microbatch)
            while address not in self._read:
                self._read_next(rank)

    def _make_room(self, rank: int) -> None:
        coming = self._coming[rank]
        if coming:
            begun = coming[0], self.wire.begin_receive(coming[0], rank)
            self._begun.setdefault(rank, deque()).append(begun)
            coming.popleft()

    def _read_next(self, rank: int) -> None:
        address, incoming = self._begun[rank][0]
        try:
            incoming.read()
        except Interrupted:
            raise
        except LostRankError as error:
            raise LostRankError(f"{address} will not come: {self._reason() or error}") from error
        self._read[address] = incoming
        self._begun[rank].popleft()

    def _reason(self) -> str:
        until = time.monotonic() + _GRACE_S
        while not (reason := self._group.failure()) and time.monotonic() < until:
            time.sleep(0.05)
        return reason


@final
@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


_Form = tuple[list[Any], pytree.TreeSpec]  # leaves, with `_Tensor` for tensors; structure
_Begun = tuple[Any, list[Callable[[], None]]]  # tree; waits for its tensors


def _mark(leaf: Any) -> Any:
    return _Tensor(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _bytes_of(tensor: Tensor, device: torch.device) -> Tensor:
    dense = tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()
    # a column of a matrix would be flat already, but not dense
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _packed(address: Address, form: bytes, parts: Sequence[Tensor]) -> Tensor:
    body_bytes = _aligned(len(form)) + sum(_aligned(part.numel()) for part in parts)
    numbers = _KINDS.index(address.kind), address.source, address.destination, address.microbatch
    head = _HEADER.pack(*numbers, len(form), body_bytes) + form
    head += bytes(-len(head) % _ALIGNED)
    pieces = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    for part in parts:
        pieces.append(part)
        if part.numel() % _ALIGNED:
            pieces.append(torch.empty(-part.numel() % _ALIGNED, dtype=torch.uint8))
    return torch.cat(pieces)


def _unpacked(body: Tensor, marks: Iterable["_Tensor"], device: torch.device) -> list[Tensor]:
    made: list[Tensor] = []
    begin = 0
    for mark in marks:
        end = begin + prod(mark.shape) * mark.dtype.itemsize
        made.append(body[begin:end].view(mark.dtype).view(mark.shape).to(device))
        begin = _aligned(end)
    return made


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _finish(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()
