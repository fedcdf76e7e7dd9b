"""Trees of tensors between pipeline ranks, and the edges of one rank's stages.

A message is a header, its form if that has changed, and the tensors. On hosts all of it is one piece, for which room is
made one message ahead. Between accelerators the tensors go by themselves, over the devices' backend.
"""

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from math import prod
from typing import Any, NamedTuple, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from evenstep.errors import TaskError
from evenstep.internals import pytree
from evenstep.parallel.group import Group
from evenstep.pipeline.action import Action, Layout, Op

SENDING = 4  # messages to one rank that are on their way at once
_ALIGNED = 64  # bytes: of the header, and the alignment of each tensor
_NUMBERS = 24  # bytes of the header in use: checksum of the address, bytes of the form, bytes of form and tensors
_SECOND = 1  # the channel of second pieces
_HOST = torch.device("cpu")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray, Enum, torch.Size, torch.dtype, torch.device)

Edge = tuple[str, int, int]  # kind of message, source, destination
Waits = list[Callable[[], None]]
Read = Callable[[], tuple[Any, Waits]]  # waits for the host's part; gives the tree, and waits for tensors on their way


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def detached(tree: Any, name: object) -> Any:
    """The same values as leaves of a new graph; TaskError for a leaf that could hide a gradient from another stage.

    `name` is for the error, such as "the output of stage 0".
    """

    def leaf(value: Any) -> Any:
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
        if is_plain:
            return value.detach().requires_grad_(value.requires_grad)
        if isinstance(value, _PLAIN):
            return value
        raise TaskError(
            f"{name} holds a {type(value).__name__}, which can't go to another stage; give dense tensors and plain "
            f"values in tuples, lists, dicts, NamedTuples or dataclasses of `torch.export.register_dataclass`."
        )

    return pytree.tree_map(leaf, tree, is_leaf=lambda value: isinstance(value, PackedSequence))


class Address(NamedTuple):
    """Name of a message."""

    kind: str  # "output" or "gradient" between stages, or "state" of a checkpoint
    source: int  # stage that it comes from; rank for a state
    destination: int
    microbatch: int

    @property
    def edge(self) -> Edge:
        """The address without the micro-batch."""
        return self[:3]

    def __str__(self) -> str:
        return f"the {self.kind} from stage {self.source} to stage {self.destination} for micro-batch {self.microbatch}"


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # kernels may add in another order where they differ
    dtype: torch.dtype
    requires_grad: bool


@final
class Wire:
    """Messages of one rank; received tensors are on `device`.

    Attributes:
        by_device: True if tensors between stages go over the backend of their device, as on accelerators.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self.by_device = device.type != "cpu"
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget all messages and forms. All ranks do, when their connections are new."""
        self._sent_forms: dict[Edge, bytes] = {}
        self._known_forms: dict[Edge, Any] = {}
        self._largest: dict[Edge, int] = {}
        self._room: dict[Edge, int] = {}
        self._sending: dict[int, deque[Waits]] = {}  # by rank
        # taken when a stage needs the message: perhaps after the receiver's own sends, which wait for this rank
        self._second_pieces: deque[Waits] = deque()

    def begin(self) -> None:
        """A plan begins, on all ranks: from now on there is room for the largest messages so far, on both ends."""
        self._room = dict(self._largest)

    def send(self, address: Address, tree: Any, rank: int) -> None:
        """Begin to send `tree`; tensors of hosts are copied."""
        apart = self.by_device and address.kind != "state"
        dense = pytree.tree_map_only(Tensor, _dense, tree)
        parts = [_bytes_of(tensor, self._device if apart else _HOST) for tensor in tensors(dense)]
        form = pickle.dumps(pytree.tree_map_only(Tensor, _mark, dense))
        changed = form if self._sent_forms.get(address.edge) != form else b""
        self._sent_forms[address.edge] = form
        piece = _packed(address, changed, [] if apart else parts)
        if self._fits(address, len(piece) - _ALIGNED):
            waits = [self.group.begin_send(piece, rank)]
        else:
            waits = [self.group.begin_send(piece[:_ALIGNED], rank)]
            self._second_pieces.append([self.group.begin_send(piece[_ALIGNED:], rank, _SECOND)])
        waits += [self.group.begin_send(part, rank) for part in parts if apart and part.numel()]
        sending = self._sending.setdefault(rank, deque())
        sending.append(waits)
        while len(sending) > SENDING:
            _finish(sending.popleft())

    def flush(self) -> None:
        """Wait until all messages have left."""
        for sending in (*self._sending.values(), self._second_pieces):
            while sending:
                _finish(sending.popleft())

    def begin_receive(self, address: Address, rank: int) -> Read:
        """Make room for the next message of `rank`, which must be `address`; messages must be read in their order."""
        piece = torch.empty(_ALIGNED + self._room.get(address.edge, 0), dtype=torch.uint8)
        wait = self.group.begin_receive(piece, rank)

        def read() -> tuple[Any, Waits]:
            wait()
            return self._read(address, piece, rank)

        return read

    def receive(self, address: Address, rank: int) -> Any:
        tree, waits = self.begin_receive(address, rank)()
        _finish(waits)
        return tree

    def _read(self, address: Address, piece: Tensor, rank: int) -> tuple[Any, Waits]:
        number, form_bytes, num_bytes = piece[:_NUMBERS].view(torch.int64).tolist()
        assert number == _checksum(address), f"another message came in place of {address}"
        body = piece[_ALIGNED : _ALIGNED + num_bytes]
        if not self._fits(address, num_bytes):
            body = torch.empty(num_bytes, dtype=torch.uint8)
            self.group.begin_receive(body, rank, _SECOND)()
        if form_bytes:
            self._known_forms[address.edge] = pickle.loads(body[:form_bytes].numpy().tobytes())
        apart = self.by_device and address.kind != "state"
        waits: Waits = []
        begin = _aligned(form_bytes)

        def made(mark: Any) -> Any:
            nonlocal begin
            if not isinstance(mark, _Tensor):
                return mark
            end = begin + prod(mark.shape) * mark.dtype.itemsize
            if apart:
                flat = torch.empty(prod(mark.shape), dtype=mark.dtype, device=self._device)
                if flat.numel():
                    waits.append(self.group.begin_receive(flat.view(torch.uint8), rank))
            else:
                flat = body[begin:end].view(mark.dtype).to(self._device)
                begin = _aligned(end)
            return flat.as_strided(mark.shape, mark.strides).requires_grad_(mark.requires_grad)

        tree = pytree.tree_map(made, self._known_forms[address.edge], is_leaf=lambda one: isinstance(one, _Tensor))
        return tree, waits

    def _fits(self, address: Address, num_bytes: int) -> bool:
        if address.kind != "state":
            self._largest[address.edge] = max(self._largest.get(address.edge, 0), num_bytes)
        return num_bytes <= self._room.get(address.edge, 0)


@final
class Edges:
    """The edges of one rank's stages."""

    def __init__(self, layout: Layout, group: Group, device: torch.device) -> None:
        self.wire = Wire(group, device)
        self._rank_of = layout.rank_of
        self._held: dict[Address, Any] = {}  # trees for stages of this rank, and those that leave
        self._arrived: dict[Address, tuple[Any, Waits]] = {}
        # by rank, in the order in which it sends: messages to come, and those with room
        self._coming: dict[int, deque[Address]] = {}
        self._begun: dict[int, deque[tuple[Address, Read]]] = {}

    def begin(self, plan: Sequence[Action]) -> None:
        """A plan begins: make room for the first messages that it receives."""
        self.wire.begin()
        self._coming, self._begun = {}, {}
        for action in plan:
            if action.op in (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT):
                self._coming.setdefault(self._rank_of[action.peer], deque()).append(_received(action))
        for rank in self._coming:
            self._begun[rank] = deque()
            self._make_room(rank)  # one message ahead of the plan

    def forget(self) -> None:
        for held in (self._held, self._arrived, self._coming, self._begun):
            held.clear()

    def get(self, address: Address) -> Any:
        """The tree of this address; waits for it if it comes from another rank."""
        rank = self._rank_of[address.source]
        if rank == self._rank_of[address.destination]:
            return self._held.pop(address)
        self._read_to(address, rank)
        tree, waits = self._arrived.pop(address)
        _finish(waits)
        return tree

    def put(self, address: Address, tree: Any) -> None:
        """Hand a tree to a stage of this rank, or keep it until an action sends it."""
        self._held[address] = tree

    def send(self, action: Action) -> None:
        kind = "output" if action.op is Op.SEND_OUTPUT else "gradient"
        address = Address(kind, action.stage, action.peer, action.microbatch)
        self.wire.send(address, self._held.pop(address), self._rank_of[action.peer])

    def receive(self, action: Action) -> None:
        """Make room for one more message from the rank of the action's peer.

        On devices both ends begin their transfers in one order, that of the plan: a message is read now.
        """
        rank = self._rank_of[action.peer]
        self._make_room(rank)
        if self.wire.by_device:
            self._read_to(_received(action), rank)

    def _make_room(self, rank: int) -> None:
        if self._coming[rank]:
            address = self._coming[rank].popleft()
            self._begun[rank].append((address, self.wire.begin_receive(address, rank)))

    def _read_to(self, wanted: Address, rank: int) -> None:
        while wanted not in self._arrived:
            address, read = self._begun[rank].popleft()
            self._arrived[address] = read()


def _received(action: Action) -> Address:
    kind = "output" if action.op is Op.RECEIVE_INPUT else "gradient"
    return Address(kind, action.peer, action.stage, action.microbatch)


def _dense(tensor: Tensor) -> Tensor:
    """The numbers without gaps."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = plain if plain.is_contiguous() else torch.empty_like(plain).copy_(plain)
    return dense.requires_grad_(tensor.requires_grad)


def _mark(dense: Tensor) -> _Tensor:
    return _Tensor(tuple(dense.shape), dense.stride(), dense.dtype, dense.requires_grad)


def _bytes_of(dense: Tensor, device: torch.device) -> Tensor:
    return dense.detach().to(device).as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _packed(address: Address, form: bytes, parts: Sequence[Tensor]) -> Tensor:
    parts = [torch.frombuffer(bytearray(form), dtype=torch.uint8), *parts] if form else parts
    num_bytes = sum(_aligned(part.numel()) for part in parts)
    header = torch.tensor([_checksum(address), len(form), num_bytes]).view(torch.uint8)
    filled = ((part, part.new_empty(-part.numel() % _ALIGNED)) for part in (header, *parts))
    return torch.cat([piece for both in filled for piece in both])


def _checksum(address: Address) -> int:
    return crc32(str(address).encode())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _finish(waits: Waits) -> None:
    for wait in waits:
        wait()
