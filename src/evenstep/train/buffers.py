"""Undoes what a forward did to the model's buffers when its update is aborted.

BatchNorm's running statistics change in the forward, long before the verdict; an aborted update must leave them as
they were. A buffer that a forward replaces (`self.mean = …`) is put back in its place with the new values, so that
whoever holds it, such as an average, sees them; static ones (masks, tables) cost a look at their version. Frozen
parameters that forwards move are kept like buffers, from the update on in which they were first seen to move. It does
not decide what statistics mean under accumulation.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from evenstep.internals import buffers_of, parameters_of, times_written
from evenstep.names import plain
from evenstep.parallel.buffers import running_statistics
from evenstep.train.frozen import FrozenParameter, FrozenParameters, mark_of


class _BufferSlot(NamedTuple):
    """Where a buffer stands in a model: in whose registry, by which names, which one it is, and whether it is saved."""

    registry: dict[str, Any]
    name: str
    full: str
    number: int
    temporary: bool


@final
class Buffers:
    """A copy of a model's buffers, and of frozen parameters that move as they do, as of the last committed update.

    Args:
        model: on its device already.

    Attributes:
        exist: whether the model has any, or frozen parameters that may be found to move.
        frozen: the names of those that were found to.
        found: the names of those that the last passes were the first to move.

    >>> norm = nn.BatchNorm1d(1); buffers = Buffers(norm)
    >>> _ = norm(torch.tensor([[1.0], [3.0]])); buffers.restore(1.0); norm.running_mean
    tensor([0.])
    """

    def __init__(self, model: nn.Module) -> None:
        # torch's normalisation kernels write running statistics without raising the tensor's version.
        silent = {id(buffer) for buffer in running_statistics(model)}
        self._places: list[_BufferSlot] = []
        self._numbers: dict[int, int] = {}
        self._buffers: list[Tensor] = []
        self._silent: list[bool] = []
        self._lasting = set(model.state_dict(keep_vars=True))
        for prefix, module in model.named_modules():
            for name, buffer in buffers_of(module).items():
                if buffer is not None:
                    self._add(
                        buffers_of(module), name, f"{prefix}.{name}" if prefix else name, buffer, id(buffer) in silent
                    )
        self._first_frozen = len(self._buffers)
        self._frozen, self.frozen, self.found = FrozenParameters(model), set[str](), list[str]()
        self.exist = bool(self._places) or self._frozen.exist
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self._versions: list[Any] = [self._version_of(number) for number in range(len(self._buffers))]

    def _add(self, registry: dict[str, Any], name: str, full: str, buffer: Tensor, silent: bool) -> None:
        if id(buffer) not in self._numbers:
            self._numbers[id(buffer)] = len(self._buffers)
            self._buffers.append(buffer)
            self._silent.append(silent)
        number, temporary = self._numbers[id(buffer)], full not in self._lasting
        self._places.append(_BufferSlot(registry, name, plain(full), number, temporary))

    def _version_of(self, number: int) -> Any:
        """What is another when it was written to."""
        buffer = self._buffers[number]
        return times_written(buffer) if number < self._first_frozen else mark_of(buffer)

    def _changed(self) -> list[int]:
        return [i for i in range(len(self._buffers)) if self._silent[i] or self._version_of(i) != self._versions[i]]

    def begin(self) -> None:
        """An update's passes begin: whatever was done since the last update stays, and what they do is told from it."""
        self.restore(0.0)
        self._frozen.begin()

    def find(self) -> None:
        """After an update's passes: keep, from now on, frozen parameters that they have moved."""
        self.found = self._keep(self._frozen.moved() if self._frozen.exist else [])

    def find_received(self) -> None:
        """After buffers were shared: keep those, too, that only other ranks have moved."""
        if self._frozen.exist:
            self._keep(self._frozen.received())

    def _keep(self, anew: list[FrozenParameter]) -> list[str]:
        names = [plain(one.full) for one in anew]
        self.frozen.update(names)
        for one in anew:
            self._add(parameters_of(one.module), one.name, one.full, one.parameter, not one.tells)
            if len(self._kept) < len(self._buffers):
                self._kept.append(one.parameter.detach().clone())  # what it was before, nobody has kept
                self._versions.append(None)  # so it has moved
        return names

    def settle(self) -> None:
        """Write what has been put in the place of a buffer into the buffer itself, which others hold as well."""
        for place in self._places:
            buffer, now = self._buffers[place.number], place.registry.get(place.name)
            if now is buffer or now is None:
                continue
            if now.shape == buffer.shape and now.dtype == buffer.dtype and now.device == buffer.device:
                buffer.detach().copy_(now.detach())
                place.registry[place.name] = buffer
            else:  # a table that has grown
                self._buffers[place.number], self._kept[place.number] = now, now.detach().clone()
                self._versions[place.number] = self._version_of(place.number)
                self._numbers[id(now)] = place.number

    def value(self, buffer: Tensor) -> Tensor:
        """What was in `buffer` after the last committed update."""
        return self._kept[self._numbers[id(buffer)]]

    def moved(self, buffer: Tensor) -> bool:
        """Whether something has written to `buffer` since; no for running statistics, and where nothing tells."""
        number = self._numbers.get(id(buffer))
        if number is None:  # a frozen parameter that has never moved
            return False
        if self._silent[number] and number >= self._first_frozen:
            return True
        return self._version_of(number) != self._versions[number]

    def moved_names(self, *, only_temporary: bool = False) -> list[str]:
        """The names of what has moved since the last committed update, but for running statistics.

        Args:
            only_temporary: whether those are left out that checkpoints hold.
        """
        return [
            place.full
            for place in self._places
            if (not self._silent[place.number] or place.number >= self._first_frozen)
            and self.moved(self._buffers[place.number])
            and (place.temporary or not only_temporary)
        ]

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """What changes inside the `with` is undone after it; what changed before stays to be judged.

        >>> norm = nn.BatchNorm1d(1); buffers = Buffers(norm)
        >>> with buffers.unchanged(): _ = norm(torch.tensor([[1.0], [3.0]]))
        >>> norm.running_mean
        tensor([0.])
        """
        self.settle()
        before = [(self._version_of(number), buffer.detach().clone()) for number, buffer in enumerate(self._buffers)]
        yield
        self.settle()
        for number, (version, value) in enumerate(before):
            buffer = self._buffers[number]
            if (self._silent[number] or self._version_of(number) != version) and buffer.shape == value.shape:
                buffer.detach().copy_(value)
                if version == self._versions[number]:
                    self._versions[number] = self._version_of(number)  # so it has not moved

    def restore(self, aborted: Tensor | float) -> None:
        """Take back the changes if `aborted` is 1, else keep them; a tensor decides on its device."""
        if not self.exist:
            return
        self.settle()
        for i in self._changed():
            buffer, kept = self._buffers[i].detach(), self._kept[i]
            if buffer.shape != kept.shape:  # `resize_`: a table that has grown
                kept = self._kept[i] = buffer.clone()
            if isinstance(aborted, Tensor):
                buffer.copy_(torch.where(aborted > 0, kept, buffer))
            elif aborted:
                buffer.copy_(kept)
            kept.copy_(buffer)
            self._versions[i] = self._version_of(i)
