"""A buffer into which a state is copied before it is written, so that training goes on meanwhile.

It holds the files as they will be, each from the beginning of a block, so that a disk can take them as they lie. It is
kept from save to save: fresh memory costs ten times what copying into it costs. Where an accelerator is, the memory is
pinned and the copies are only enqueued; whoever writes waits for them, training does not.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import final

import torch
from torch import Tensor

from evenstep.checkpoint.ranks import in_background
from evenstep.checkpoint.storage import BLOCK_BYTES
from evenstep.checkpoint.tensorfile import TensorFile

_HEADER_BYTES = 512
"""More than what a file's header takes for most tensors."""


@final
class Staging:
    """A reusable copy of the files of a save.

    >>> file = TensorFile({"bias": torch.ones(2)})
    >>> wait = Staging().copy([file])
    >>> wait()
    >>> b"".join(file.chunks())[-8:]
    b'\\x00\\x00\\x80?\\x00\\x00\\x80?'
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._heads: list[bytes] = []
        self._images: list[Tensor] = []
        self._views: list[Tensor] = []
        self._preparing: Future[None] | None = None

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Take memory for copies of such tensors, in the background, so that the first `copy` is as short as others.

        If there is none, `copy` asks again.
        """
        size = sum(tensor.numel() * tensor.element_size() + _HEADER_BYTES for tensor in tensors)
        device = _device(tensors)
        self._preparing = in_background(lambda: self._reserve(size + (1 << 20), device))

    def copy(self, files: Sequence[TensorFile]) -> Callable[[], None]:
        """Let the files be written from copies of their tensors; gives what to call before they are.

        Args:
            files: with tensors on the CPU and at most one accelerator. Their bytes hold until the next call.

        Raises:
            Exception: what an allocator raises that has no memory; the files are then written from the tensors.
        """
        if self._preparing is not None:
            wait([self._preparing])
            self._preparing = None
        tensors = [tensor for file in files for tensor in file.tensors]
        device = _device(tensors)
        self._reserve(sum(_blocks(file.size) for file in files), device)
        heads = [file.head for file in files]
        if heads != self._heads:
            self._heads = heads
            self._cut(files)
        with torch.no_grad():
            # one at a time: each is one memcpy, and a foreach copy on a CPU is no faster
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
        for file, image in zip(files, self._images, strict=True):
            file.take_from(image)
        if device is None:
            return lambda: None
        event = torch.Event(device)
        # of the tensors' own device, on which the copies are, whichever one is the current
        event.record(torch.accelerator.current_stream(device))
        return event.synchronize

    def _reserve(self, num_bytes: int, device: torch.device | None) -> None:
        if num_bytes <= self._buffer.numel():
            return
        self._heads, self._images, self._views = [], [], []
        buffer = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=device is not None)
        buffer.zero_()  # touches every page now
        self._buffer = buffer[-buffer.data_ptr() % BLOCK_BYTES :]

    def _cut(self, files: Sequence[TensorFile]) -> None:
        self._images, self._views, begin = [], [], 0
        for file in files:
            image = self._buffer[begin : begin + file.size]
            self._images.append(image)
            self._views += file.cut(image)
            begin += _blocks(file.size)


def _blocks(size: int) -> int:
    return size + -size % BLOCK_BYTES


def _device(tensors: Sequence[Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
