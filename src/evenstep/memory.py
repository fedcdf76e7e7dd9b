"""What running out of memory looks like, and how what is no longer needed is given back.

Devices, torch's CPU allocator and Python itself say it in three ways, and only the first has a class of its own. It
does not decide what is done about it; that is `evenstep.train`'s.
"""

import gc
import sys

from evenstep.errors import EvenstepError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there was no memory left, on whatever device.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("out of memory"))
    (True, False)
    """
    if isinstance(error, EvenstepError):
        return False  # said on purpose, when nothing can be done about it any more
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


def give_back() -> None:
    """Free what nothing refers to any more, cycles included, and return cached device memory to the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
