"""Restores the buffers of a model when an update is aborted.

BatchNorm's running statistics change in the forward, before the verdict. A buffer that a forward replaces
(`self.mean = …`) is put back in its place with the new values, so that an average that holds it sees them.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from evenstep.internals import buffers_of, times_written
from evenstep.parallel.buffers import running_statistics


class _Place(NamedTuple):
    registry: dict[str, Any]
    name: str
    number: int


@final
class Buffers:
    """Copy of a model's buffers as of the last committed update.

    Args:
        model: on its device already.

    >>> norm = nn.BatchNorm1d(1); buffers = Buffers(norm)
    >>> _ = norm(torch.tensor([[1.0], [3.0]])); buffers.restore(1.0); norm.running_mean
    tensor([0.])
    """

    def __init__(self, model: nn.Module) -> None:
        # torch's normalisation kernels write running statistics without raising the tensor's version
        silent = {id(buffer) for buffer in running_statistics(model)}
        self._places: list[_Place] = []
        self._numbers: dict[int, int] = {}
        self._buffers: list[Tensor] = []
        for module in model.modules():
            registry = buffers_of(module)
            for name, buffer in registry.items():
                if buffer is not None:
                    if id(buffer) not in self._numbers:
                        self._numbers[id(buffer)] = len(self._buffers)
                        self._buffers.append(buffer)
                    self._places.append(_Place(registry, name, self._numbers[id(buffer)]))
        self._silent = [id(buffer) in silent for buffer in self._buffers]
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self._versions = [times_written(buffer) for buffer in self._buffers]

    def settle(self) -> None:
        """Write the tensor that replaced a buffer into the buffer itself, which others hold as well."""
        for place in self._places:
            buffer, now = self._buffers[place.number], place.registry.get(place.name)
            if now is buffer or now is None:
                continue
            if now.shape == buffer.shape and now.dtype == buffer.dtype and now.device == buffer.device:
                buffer.detach().copy_(now.detach())
                place.registry[place.name] = buffer
            else:  # a table that has grown
                self._buffers[place.number] = now
                self._kept[place.number] = now.detach().clone()
                self._versions[place.number] = times_written(now)
                self._numbers[id(now)] = place.number

    def value(self, buffer: Tensor) -> Tensor:
        """Value of `buffer` after the last committed update."""
        return self._kept[self._numbers[id(buffer)]]

    def moved(self, buffer: Tensor) -> bool:
        """True if `buffer` was written to since the last committed update."""
        number = self._numbers[id(buffer)]
        return times_written(self._buffers[number]) != self._versions[number]

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """Changes inside are undone; earlier ones stay to be judged."""
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
        self.settle()
        for number, original in enumerate(self._buffers):
            if not self._silent[number] and times_written(original) == self._versions[number]:
                continue
            buffer, kept = original.detach(), self._kept[number]
            if buffer.shape != kept.shape:  # `resize_`: a table that has grown
                kept = self._kept[number] = buffer.clone()
            if isinstance(aborted, Tensor):
                buffer.copy_(torch.where(aborted > 0, kept, buffer))
            elif aborted:
                buffer.copy_(kept)
            kept.copy_(buffer)
            self._versions[number] = times_written(original)
