"""torch's multi-tensor kernels, with types: one launch for many tensors.

They have no public names in torch 2.13, though its optimizers are made of them, so they are named here and nowhere
else. Nothing is computed here.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

_torch = cast("Any", torch)


def foreach_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """‖t‖₂ of each tensor, 0-dim, computed in `dtype` (None: in its own)."""
    return _torch._foreach_norm(tensors) if dtype is None else _torch._foreach_norm(tensors, 2, dtype)


def foreach_multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """t ← t · factor, in place."""
    if tensors:  # a rank of a pipeline may have nothing to train
        _torch._foreach_mul_(tensors, factor)


def foreach_divide(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """t ← t / divisor, in place; the divisor is 0-dim and stays on its device."""
    if tensors:
        _torch._foreach_div_(tensors, divisor)


def foreach_move(tensors: Sequence[Tensor], ends: Sequence[Tensor], share: float | Sequence[Tensor]) -> None:
    """t ← t + share · (end - t), in place."""
    if tensors:
        _torch._foreach_lerp_(tensors, ends, share)


def shard(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds, sharing its memory; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
