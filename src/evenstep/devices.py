"""What the host does with an accelerator without waiting for it, and which of several it works with.

A number that the host knows is written by a kernel: copied, the host would wait until the device has caught up. Each
process works with one accelerator, which is also torch's current one, since streams, events, kernels of other
libraries and the threads that pin memory ask for that one. It moves no batches.
"""

import torch
from torch import Tensor

from evenstep.errors import ArgumentError


def scalar_on(value: float | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`value` as a 0-dim tensor on `device`; no accelerator is waited for.

    Args:
        value: a number, or a tensor on the CPU or on `device`.
        dtype: of the result; None: that of the tensor, or torch's for such a number.

    >>> scalar_on(2, torch.device("cpu")), scalar_on(torch.tensor(2), torch.device("cpu"), torch.float64)
    (tensor(2), tensor(2., dtype=torch.float64))
    """
    if isinstance(value, Tensor):
        # what an accelerator still computes must be waited for; memory of the host is read before the call returns
        return value.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=dtype, device=device)


def device_here(device: str | torch.device) -> torch.device:
    """The device as its tensors have it: "cuda" is one of several by its number.

    Raises:
        ArgumentError: this machine has no such device.

    >>> device_here("cpu")
    device(type='cpu')
    """
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, ImportError) as error:  # torch asks for the package of some by an import
        why = str(error).splitlines()[0]
        raise ArgumentError(
            f"`device` must be 'auto', 'cpu' or an accelerator of this machine, but is '{device}': {why}",
            field="device",
        ) from error


def make_current(device: torch.device) -> None:
    if device.type == "cuda" and device != torch.device("cuda"):
        torch.cuda.set_device(device)
