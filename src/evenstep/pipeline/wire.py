"""Trees of tensors on their way between pipeline ranks.

A message is a header of a few numbers, its form (structure, shapes, dtypes) if that differs from the last one on the
same edge, and the tensors. So nobody has to know shapes beforehand, they may change with every micro-batch, and what
comes is always what was announced. One thread per peer receives, as far ahead as the plan allows; sends do not wait,
and few are on their way at once. It knows neither modules nor gradients.
"""

import pickle
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Self, final

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from evenstep.errors import EvenstepError
from evenstep.parallel.group import Group

AHEAD = 2  # messages received before the plan has come to their place
SENDING = 4  # messages to one rank that are on their way at once
_LOOK_EVERY_S = 0.5
_GRACE_S = 2.0  # a rank that fails leaves word and then its connections break; the word may come a little later
_Sending = tuple[list[Callable[[], None]], list[Tensor]]  # how to wait for a message, and what must stay until then
_KINDS = ("output", "gradient", "state", "prediction")


@final
@dataclass(frozen=True, slots=True)
class Address:
    """Which tree a message holds.

    Args:
        kind: "output" or "gradient"; "state" for what a checkpoint gathers, "prediction" for what is collected.
        source: the stage that it comes from; of what is collected, the rank.
        destination: the stage, or rank, that it goes to.
        microbatch: global number.
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
        group: the pipeline's ranks.
        device: where received tensors are put.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sent_forms: dict[tuple[str, int, int], bytes] = {}
        self._known_forms: dict[tuple[str, int, int], Any] = {}
        self._sending: dict[int, deque[_Sending]] = {}

    def send(self, address: Address, tree: Any, rank: int) -> None:
        """Begin to send `tree`, whose tensors must not change any more."""
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        tensors = [leaf.detach().to(self._device).contiguous() for leaf in leaves]
        form = pickle.dumps(pytree.tree_map(_mark, tree))
        known = self._sent_forms.get(address.edge) == form
        self._sent_forms[address.edge] = form
        numbers = [_KINDS.index(address.kind), address.source, address.destination, address.microbatch]
        header = torch.tensor([*numbers, 0 if known else len(form)], dtype=torch.int64, device=self._device)
        parts = [header, *tensors]
        if not known:
            parts.insert(1, torch.frombuffer(bytearray(form), dtype=torch.uint8).to(self._device))
        waits = [self._group.begin_send(part, rank) for part in parts]
        queue = self._sending.setdefault(rank, deque())
        queue.append((waits, parts))
        while len(queue) > SENDING:
            _finish(queue.popleft())

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for queue in self._sending.values():
            while queue:
                _finish(queue.popleft())

    def receive(self, rank: int) -> tuple[Address, Any]:
        """Wait for the next message of `rank`."""
        header = torch.empty(5, dtype=torch.int64, device=self._device)
        self._group.receive(header, rank)
        kind, source, destination, microbatch, num_bytes = header.tolist()
        address = Address(_KINDS[kind], source, destination, microbatch)
        if num_bytes:
            form = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._group.receive(form, rank)
            self._known_forms[address.edge] = pickle.loads(form.cpu().numpy().tobytes())
        return address, pytree.tree_map(partial(self._leaf, rank), self._known_forms[address.edge])

    def _leaf(self, rank: int, mark: Any) -> Any:
        if not isinstance(mark, _Tensor):
            return mark
        tensor = torch.empty(mark.shape, dtype=mark.dtype, device=self._device)
        self._group.receive(tensor, rank)
        # of a leaf that nobody has computed anything from yet, so that nothing has to be copied
        return tensor.requires_grad_(mark.requires_grad)


@final
@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _finish(sending: _Sending) -> None:
    for wait in sending[0]:
        wait()


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _Tensor(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf


@final
class Inbox:
    """What is received during one run of a plan: a thread per peer fills it, the runner takes from it.

    Args:
        wire: of this rank.
        group: the pipeline's ranks.
        expected: for each peer how many messages will come from it.

    A thread runs AHEAD of the plan by so many messages and no further, so that memory does not grow with the number
    of micro-batches.
    """

    def __init__(self, wire: Wire, group: Group, expected: dict[int, int]) -> None:
        self._wire = wire
        self._group = group
        self._changed = Condition()
        self._here: dict[Address, Any] = {}
        self._allowed = dict.fromkeys(expected, AHEAD)
        self._fault: Exception | None = None
        self._over = False
        self._threads = [
            Thread(target=self._listen, args=(rank, count), name=f"evenstep-from-rank-{rank}", daemon=True)
            for rank, count in expected.items()
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:  # after an error the runner has aborted the group, which ends their waiting
            thread.join(None if error is None else _GRACE_S)

    def allow(self, rank: int) -> None:
        """The plan has come to the next message of `rank`."""
        with self._changed:
            self._allowed[rank] += 1
            self._changed.notify_all()

    def take(self, address: Address) -> Any:
        """Wait for what `address` names.

        Raises:
            EvenstepError: it will not come; the message says which rank failed, and why.
        """
        looked = time.monotonic()
        with self._changed:
            while address not in self._here:
                if self._fault is not None:
                    raise EvenstepError(self._why(address)) from self._fault
                self._changed.wait(_LOOK_EVERY_S)
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    looked = time.monotonic()
                    reason = self._group.abort_reason()
                    if reason and address not in self._here:
                        raise EvenstepError(f"{address} will not come: {reason}")
            return self._here.pop(address)

    def _why(self, address: Address) -> str:
        until = time.monotonic() + _GRACE_S
        while not (reason := self._group.abort_reason()) and time.monotonic() < until:
            time.sleep(0.05)
        return f"{address} will not come: {reason or self._fault}"

    def _listen(self, rank: int, count: int) -> None:
        try:
            for _ in range(count):
                with self._changed:
                    while self._allowed[rank] == 0 and not self._over:
                        self._changed.wait()
                    if self._over and self._allowed[rank] == 0:
                        return
                    self._allowed[rank] -= 1
                address, tree = self._wire.receive(rank)
                with self._changed:
                    self._here[address] = tree
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised again where the runner waits
            with self._changed:
                self._fault = error
                self._changed.notify_all()
