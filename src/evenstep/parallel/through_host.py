"""Messages of ranks that share one accelerator: through copies on the host.

NCCL refuses two ranks on one device, and gloo sends no device tensors; so they are copied through the host.
"""

import socket
from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor

Finish = Callable[[], None]
Begin = Callable[[Tensor], Finish]


def directly(tensor: Tensor, begin: Begin, *, comes_back: bool) -> Finish:
    """Give a message its tensor itself."""
    return begin(tensor)


def through_host(tensor: Tensor, begin: Begin, *, comes_back: bool) -> Finish:
    """Give a message a copy on the host.

    Args:
        tensor: on any device; of the host it is taken itself.
        begin: begins with the tensor that it is given; gives what waits for the end.
        comes_back: whether the message writes to it.

    Returns:
        What waits for the end, after which `tensor` holds what has come.

    >>> def doubled(one: Tensor) -> Finish:
    ...     one.mul_(2)
    ...     return lambda: None
    >>> held = torch.ones(2)
    >>> through_host(held, doubled, comes_back=True)()
    >>> held
    tensor([2., 2.])
    """
    if tensor.device.type == "cpu":
        return begin(tensor)
    copy = tensor.detach().cpu()
    wait = begin(copy)

    def finish() -> None:
        wait()
        if comes_back:
            tensor.detach().copy_(copy)

    return finish


def place_of(device: torch.device) -> int:
    """A number that ranks on the same accelerator of the same machine have in common."""
    here = torch.cuda.get_device_properties(device).uuid
    return crc32(socket.gethostname().encode()) << 31 | crc32(str(here).encode()) >> 1
