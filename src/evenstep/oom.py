"""What running out of memory looks like, and how what is no longer needed is given back.

Only the devices' caching allocators have a class of their own for it. Kernels, libraries and allocators that ask the
driver themselves say it in words, which stand in one table here. All of them are refusals that leave the device as it
was, so that a smaller piece can be tried: also CUDA's own "out of memory" (error 2), which, unlike a fault of a kernel,
does not stay with the context. A collective that found no memory is none of them: what its peers have of it is not
known. It does not decide what is done about it; that is `evenstep.train`'s.
"""

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from evenstep.errors import ArgumentError, EvenstepError

if TYPE_CHECKING:
    import torch

# in lower case; of "out of memory" by itself anybody may speak, for whom cutting is no answer
WORDS = (
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "hip error: out of memory",
    "triton error [cuda]: out of memory",
    "triton error [hip]: out of memory",
    "mps backend out of memory",
    "out of memory. tried to allocate",  # of the caching allocators, whichever device's, also where it was wrapped
    "defaultcpuallocator: ",  # "can't allocate memory: you tried to allocate ..."
    "cudaerrormemoryallocation",
    "hiperroroutofmemory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",  # since cuDNN 9
    "cudnn_status_internal_error_host_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cufft_alloc_failed",
    "rocblas_status_memory_error",
    "hipblas_status_alloc_failed",
    "miopenstatusallocfailed",
    "ur_result_error_out_of_device_memory",  # of Intel's GPUs: the unified runtime and its predecessor
    "ur_result_error_out_of_host_memory",
    "pi_error_out_of_resources",
)
_COLLECTIVES = ("DistBackendError", "DistError", "DistNetworkError", "DistStoreError")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there was no memory left, on whatever device, and that a smaller piece can be tried.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("out of memory"))
    (True, False)
    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    """
    if isinstance(error, EvenstepError):
        return False  # said on purpose, when nothing can be done about it any more
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError) or type(error).__name__ in _COLLECTIVES:
        return False
    text = str(error).lower()
    return any(words in text for words in WORDS)


def give_back() -> None:
    """Free what nothing refers to any more, cycles included, and return cached device memory to the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def build_emptying(every_updates: int | None, device: "torch.device") -> Callable[[int], None] | None:
    """What is called with the number of each update that has ended; None where there is nothing to do.

    It gives back what the allocator keeps for later, which another process on the device, or an allocator in pieces,
    may need; by itself it makes updates slower. It frees nothing that is in use.

    Args:
        every_updates: how often it empties the cache; None for never.

    Raises:
        ArgumentError: the device's allocator keeps nothing.

    >>> import torch
    >>> build_emptying(None, torch.device("cpu"))
    """
    if every_updates is None:
        return None
    if device.type == "cpu":
        raise ArgumentError(
            f"`memory.empty_cache_every_updates` is {every_updates}, but the run is on a CPU, where freed memory is "
            f"not kept for later; leave it out, or compute on an accelerator (`device`).",
            field="memory.empty_cache_every_updates",
        )

    import torch

    def empty(update: int) -> None:
        if update % every_updates == 0:
            torch.accelerator.empty_cache()

    return empty
