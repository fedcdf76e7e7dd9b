"""How a tensor lies in memory: kernels that take all of a tensor at once pair elements by their place there.

Parameters in channels-last order, or transposed ones, do not lie row by row, and torch's fused optimizers step each
element with what lies at the same place in its gradient. So what comes from other ranks, which is sent row by row, is
laid out as its parameter is. It changes no value. Beside it, in which format gradients are: that of the parameter,
unless the parameter says another (`Tensor.grad_dtype`), as those of 16 bits do.
"""

import torch
from torch import Tensor


def gradient_format(parameter: Tensor) -> torch.dtype:
    """The number format in which a parameter's gradients are summed: mostly its own; float32 where that is left open.

    >>> gradient_format(torch.zeros(1, dtype=torch.float64))
    torch.float64
    """
    return parameter.grad_dtype or torch.float32


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` in the shape of `like`, and lying in memory as that does; a copy only where it lay otherwise.

    A stand-in that takes no memory (`expand`) says nothing of how it should lie.

    >>> laid_out(torch.arange(4.0), torch.zeros(2, 2).t()).stride()
    (1, 2)
    """
    shaped = tensor.view(like.shape)
    as_is = shaped.stride() == like.stride() or 0 in like.stride()
    return shaped if as_is else torch.empty_like(like, dtype=tensor.dtype).copy_(shaped)


def is_dense(tensor: Tensor) -> bool:
    """Whether its values lie in memory as they are: not sparse, quantised or nested.

    >>> is_dense(torch.eye(2)), is_dense(torch.eye(2).to_sparse())
    (True, False)
    """
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def shares_memory(tensor: Tensor) -> bool:
    """Whether elements of `tensor` are one memory, as after `expand`: torch writes into no such tensor.

    >>> shares_memory(torch.ones(1).expand(5)), shares_memory(torch.ones(1, 1).expand(1, 1))
    (True, False)
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in pairs)
