"""Undoes what a forward did to the model's buffers when its update is aborted.

BatchNorm's running statistics change in the forward, long before the verdict; an aborted update must leave them as
they were. A buffer that a forward replaces (`self.mean = …`) is put back in its place with the new values, so that
whoever holds it, such as an average, sees them; static ones (masks, tables) cost a look at their version. It does not
decide what statistics mean under accumulation.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from evenstep.internals import buffers_of, times_written
from evenstep.names import plain
from evenstep.parallel.buffers import running_statistics


class _BufferSlot(NamedTuple):
    """Where a buffer stands in a model: in whose registry, by which names, which one it is, and whether it is saved."""

    registry: dict[str, Tensor | None]
    name: str
    full: str
    number: int
    temporary: bool


@final
class Buffers:
    """A copy of a model's buffers as of the last committed update.

    Args:
        model: on its device already.

    Attributes:
        exist: whether the model has any.

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
                    self._add(module, name, f"{prefix}.{name}" if prefix else name, buffer, id(buffer) in silent)
        self.exist = bool(self._places)
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self._versions = [times_written(buffer) for buffer in self._buffers]

    def _add(self, module: nn.Module, name: str, full: str, buffer: Tensor, silent: bool) -> None:
        if id(buffer) not in self._numbers:
            self._numbers[id(buffer)] = len(self._buffers)
            self._buffers.append(buffer)
            self._silent.append(silent)
        number, temporary = self._numbers[id(buffer)], full not in self._lasting
        self._places.append(_BufferSlot(buffers_of(module), name, plain(full), number, temporary))

    def _changed(self) -> list[int]:
        return [
            i for i, buffer in enumerate(self._buffers) if self._silent[i] or times_written(buffer) != self._versions[i]
        ]

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
                self._versions[place.number] = times_written(now)
                self._numbers[id(now)] = place.number

    def value(self, buffer: Tensor) -> Tensor:
        """What was in `buffer` after the last committed update."""
        return self._kept[self._numbers[id(buffer)]]

    def moved(self, buffer: Tensor) -> bool:
        """Whether something has written to `buffer` since, of those whose version tells."""
        number = self._numbers[id(buffer)]
        return times_written(buffer) != self._versions[number]

    def moved_names(self, *, only_temporary: bool = False) -> list[str]:
        """The names of the buffers that have moved since the last committed update, but for running statistics.

        Args:
            only_temporary: whether those are left out that checkpoints hold.
        """
        return [
            place.full
            for place in self._places
            if not self._silent[place.number]
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
        before = [(times_written(buffer), buffer.detach().clone()) for buffer in self._buffers]
        yield
        self.settle()
        for number, (version, value) in enumerate(before):
            buffer = self._buffers[number]
            if (self._silent[number] or times_written(buffer) != version) and buffer.shape == value.shape:
                buffer.detach().copy_(value)
                if version == self._versions[number]:
                    self._versions[number] = times_written(buffer)  # so it has not moved

    def restore(self, aborted: Tensor | float) -> None:
        """Take back the changes if `aborted` is 1, else keep them; a tensor decides on its device."""
        if not self.exist:
            return
        self.settle()
        for i in self._changed():
            buffer, kept = self._buffers[i].detach(), self._kept[i]
            if isinstance(aborted, Tensor):
                buffer.copy_(torch.where(aborted > 0, kept, buffer))
            elif aborted:
                buffer.copy_(kept)
            kept.copy_(buffer)
            self._versions[i] = times_written(self._buffers[i])
