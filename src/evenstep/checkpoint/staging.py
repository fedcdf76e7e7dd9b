"""A buffer into which a state is copied before it is written, so that training goes on meanwhile.

It is kept from save to save: fresh memory costs ten times what copying into it costs. Where an accelerator is, the
memory is pinned and the copies are only enqueued; whoever writes waits for them, training does not.
"""

from collections.abc import Callable, Sequence
from threading import Thread
from typing import final

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 64


@final
class Staging:
    """A reusable copy of the tensors of a state.

    >>> staging = Staging()
    >>> copies, wait = staging.copy([torch.ones(2)])
    >>> wait()
    >>> copies
    [tensor([1., 1.])]
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._key: object = None
        self._views: list[Tensor] = []
        self._preparing: Thread | None = None

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Take memory for copies of such tensors, in the background, so that the first `copy` is as short as others."""
        self._preparing = Thread(target=self._reserve, args=(_num_bytes(tensors), _device(tensors)), daemon=True)
        self._preparing.start()

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Copies of the tensors, which hold until the next call, and what to call before they are read.

        Args:
            tensors: on the CPU and at most one accelerator.
        """
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        device = _device(tensors)
        self._reserve(_num_bytes(tensors), device)
        key = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if key != self._key:
            self._key, self._views = key, self._cut(tensors)
        with torch.no_grad():
            # one at a time: each is one memcpy, and a foreach copy on a CPU is no faster
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
        if device is None:
            return list(self._views), _nothing
        event = torch.Event(device)
        event.record()
        return list(self._views), event.synchronize

    def _reserve(self, num_bytes: int, device: torch.device | None) -> None:
        if num_bytes <= self._buffer.numel():
            return
        self._key, self._views = None, []
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device is not None)
        self._buffer.zero_()  # touches every page now

    def _cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        views: list[Tensor] = []
        begin = 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            views.append(self._buffer[begin : begin + size].view(tensor.dtype).view(tensor.shape))
            begin += _aligned(size)
        return views


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT_BYTES


def _device(tensors: Sequence[Tensor]) -> torch.device | None:
    """The accelerator that some of the tensors are on, if copies from it can run beside the host's work."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)


def _nothing() -> None: ...
