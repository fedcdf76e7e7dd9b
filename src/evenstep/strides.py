"""How a tensor lies in memory: kernels that take all of a tensor at once pair elements by their place there.

Parameters in channels-last order, or transposed ones, do not lie row by row, and torch's fused optimizers step each
element with what lies at the same place in its gradient. So what comes from other ranks, which is sent row by row, is
laid out as its parameter is. It changes no value. Beside it, in which format gradients are: that of the parameter,
unless the parameter says another (`Tensor.grad_dtype`), as those of 16 bits do.
"""

from collections.abc import Collection, Mapping

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


def overlapping(tensors: Mapping[str, Tensor], *, beside: Collection[str] = ()) -> tuple[str, str] | None:
    """The names of the first two tensors that have elements in common memory; None where there are none.

    Args:
        beside: names of those that may have some in common with each other.

    >>> both = torch.ones(2, 4)
    >>> overlapping({"a": both[:, :2], "b": both[:, 2:]}), overlapping({"a": both[0], "b": both[:, :1]})
    (None, ('a', 'b'))
    """
    known: dict[int, list[tuple[str, Tensor]]] = {}
    for name, one in tensors.items():
        if one.layout != torch.strided or one.is_meta or not one.numel():
            continue
        others = known.setdefault(one.untyped_storage().data_ptr(), [])
        for other, before in others:
            if (name not in beside or other not in beside) and _share_elements(one, before):
                return other, name
        others.append((name, one))
    return None


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in one storage have elements in common."""
    (begin, end), (first, last) = _span(one), _span(other)
    if end <= first or last <= begin:
        return False
    if end - begin == one.nbytes and last - first == other.nbytes:  # without gaps
        return True
    return bool(torch.isin(_places(one), _places(other)).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + length * tensor.itemsize


def _places(tensor: Tensor) -> Tensor:
    """Where the elements of a tensor begin in its storage, in bytes."""
    places = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places.flatten() * tensor.itemsize
