"""Small parts: errors that are out of memory, keys of random numbers, sums over bytes."""

import pytest
import torch

from evenstep.errors import OutOfMemoryError
from evenstep.keys import key
from evenstep.oom import is_out_of_memory
from evenstep.tensors import byte_sum

_ACCELERATOR = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect."
)
OUT_OF_MEMORY = {
    "torch's class": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "a CUDA call by itself": torch.AcceleratorError(_ACCELERATOR),
    "the same before torch 2.9": RuntimeError(_ACCELERATOR),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN 9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "pinned host memory": RuntimeError("CUDA error: cudaErrorMemoryAllocation: out of memory"),
    "HIP": RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.98 GiB total capacity)"),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GiB, other allocations: 1.1 GiB)."),
    "XPU": RuntimeError("Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "the CPU allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 80000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "Python": MemoryError(),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
}
OTHER = {
    "a wrong shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "a kernel's fault, which stays with the context": torch.AcceleratorError("CUDA error: an illegal memory access"),
    "cuBLAS, of another kind": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    "cuDNN, of another kind": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    "somebody who speaks of it": RuntimeError("the queue of the tokenizer is out of memory slots"),
    "no RuntimeError": ValueError("out of memory"),
    "evenstep's own, when nothing helps": OutOfMemoryError("rank 0 ran out of memory, and it can't be cut any finer"),
    "a collective, of which peers may have a part": torch.distributed.DistBackendError(
        "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'"
    ),
}


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_out_of_memory_that_is_not_torch_s_class_is_recognised(name: str) -> None:
    assert is_out_of_memory(OUT_OF_MEMORY[name])


@pytest.mark.parametrize("name", OTHER)
def test_what_a_smaller_piece_does_not_mend_is_not_taken_for_it(name: str) -> None:
    assert not is_out_of_memory(OTHER[name])


def test_keys_of_near_paths_and_of_names_differ() -> None:
    low = {key(42, update, microbatch) & 0xFFFF for update in range(64) for microbatch in range(8)}
    assert len(low) > 480  # 512 draws of 65536: about 2 collisions are expected
    assert key(1, 5) != key(2, 4)
    assert key(0, "1") != key(0, 1)
    assert key(0, "a", "b") != key(0, "b", "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_byte_sum_changes_with_the_sign_of_each_element(dtype: torch.dtype) -> None:
    values = torch.arange(1, 301).to(dtype)
    before = byte_sum(values)
    for place in range(300):
        values[place].neg_()
        assert byte_sum(values) != before
        values[place].neg_()
