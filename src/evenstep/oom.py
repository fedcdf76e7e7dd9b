"""Errors of libraries and devices that have run out of memory, after which a smaller piece can be tried.

Errors of collectives are not among them: their peers may have received a part.
"""

import gc
import sys

from evenstep.errors import EvenstepError

# in lower case; any error may contain "out of memory" alone
WORDS = (
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "hip error: out of memory",
    "triton error [cuda]: out of memory",
    "triton error [hip]: out of memory",
    "mps backend out of memory",
    "out of memory. tried to allocate",  # caching allocators of all devices
    "defaultcpuallocator: ",
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
    "ur_result_error_out_of_device_memory",  # Intel's GPUs
    "ur_result_error_out_of_host_memory",
    "pi_error_out_of_resources",
)
_COLLECTIVES = ("DistBackendError", "DistError", "DistNetworkError", "DistStoreError")


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device or the host had no memory left, so that a smaller piece can be tried."""
    if isinstance(error, EvenstepError):
        return False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError) or type(error).__name__ in _COLLECTIVES:
        return False
    text = str(error).lower()
    return any(words in text for words in WORDS)


def give_back() -> None:
    """Free unreachable cycles, and return cached memory to the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
