"""Undoes what a forward did to the model's buffers when its update is aborted.

BatchNorm's running statistics change in the forward, long before the verdict; an aborted update must leave them as
they were. Only buffers that are changed in place are followed, which is how torch's own modules change them; static
ones (masks, tables) cost a look at their version. It does not decide what statistics mean under accumulation.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from evenstep.parallel.replicas import running_statistics


@final
class Buffers:
    """A copy of a model's buffers as of the last committed update.

    Args:
        model: on its device already.

    >>> norm = nn.BatchNorm1d(1); buffers = Buffers(norm)
    >>> _ = norm(torch.tensor([[1.0], [3.0]])); buffers.restore(1.0); norm.running_mean
    tensor([0.])
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self._versions = [buffer._version for buffer in self._buffers]
        # torch's normalisation kernels write running statistics without raising the tensor's version.
        silent = {id(buffer) for buffer in running_statistics(model)}
        self._silent = [id(buffer) in silent for buffer in self._buffers]

    def _changed(self) -> list[int]:
        return [i for i, buffer in enumerate(self._buffers) if self._silent[i] or buffer._version != self._versions[i]]

    @contextmanager
    def unchanged(self) -> Generator[None]:
        """What changes inside the `with` is undone after it; what changed before stays to be judged.

        >>> norm = nn.BatchNorm1d(1); buffers = Buffers(norm)
        >>> with buffers.unchanged(): _ = norm(torch.tensor([[1.0], [3.0]]))
        >>> norm.running_mean
        tensor([0.])
        """
        before = [(buffer._version, buffer.detach().clone()) for buffer in self._buffers]
        yield
        for buffer, silent, (version, value) in zip(self._buffers, self._silent, before, strict=True):
            if silent or buffer._version != version:
                buffer.detach().copy_(value)

    def restore(self, aborted: Tensor | float) -> None:
        """Take back the changes if `aborted` is 1, else keep them; a tensor decides on its device."""
        for i in self._changed():
            buffer, kept = self._buffers[i].detach(), self._kept[i]
            if isinstance(aborted, Tensor):
                buffer.copy_(torch.where(aborted > 0, kept, buffer))
            elif aborted:
                buffer.copy_(kept)
            kept.copy_(buffer)
            self._versions[i] = self._buffers[i]._version
