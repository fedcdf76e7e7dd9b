"""Stochastic rounding to 16 bits, by keyed randomness.

x between the neighbours a < b of the format becomes b with probability (x - a)/(b - a), so that the mean is x. Which
way an element goes is a function of a key and of its place in the whole tensor, whoever holds it: numbers are drawn for
blocks of elements, each block by a generator seeded from (key, block). It rounds numbers that are finite; what is inf
stays inf.
"""

import math

import torch
from torch import Tensor

from evenstep.keys import key_below

_BLOCK = 1 << 22  # elements drawn by one seed
_SMALLEST_NORMAL, _STEP = 2.0**-14, 2.0**-24  # of float16, and the distance of all below
_DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # bits of float32's mantissa that the format has not


def round_into(narrow: Tensor, wide: Tensor, *, branch: int, first: int = 0, size: int | None = None) -> None:
    """Round `wide` into `narrow`.

    Args:
        narrow: of 16 bits, changed in place.
        wide: of float32, the same shape.
        branch: of the key (`evenstep.keys.branch`).
        first: the place of its first element in the whole tensor.
        size: of the whole tensor; that of `wide` by default.

    >>> wide = torch.full((4096,), 1 + 2.0**-9)  # a quarter of the way from 1 to 1 + 2⁻⁷
    >>> narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    >>> round_into(narrow, wide, branch=7)
    >>> bool((narrow == 1).float().mean().sub(0.75).abs() < 0.03), sorted(set(narrow.tolist()))
    (True, [1.0, 1.0078125])
    """
    flat = wide.reshape(-1)
    rounded = torch.empty_like(flat, dtype=narrow.dtype)
    generator = torch.Generator(flat.device)
    whole = flat.numel() if size is None else size
    for block in range(first // _BLOCK, math.ceil((first + flat.numel()) / _BLOCK)):
        begin, end = block * _BLOCK, min((block + 1) * _BLOCK, whole)
        own = slice(max(begin, first) - first, min(end, first + flat.numel()) - first)
        generator.manual_seed(
            key_below(branch, block) & 0xFFFFFFFF if flat.device.type == "cpu" else key_below(branch, block)
        )
        drawn = torch.empty(end - begin, dtype=torch.int32, device=flat.device)
        drawn.random_(0, 1 << _DROPPED[narrow.dtype], generator=generator)
        at = max(begin, first) - begin
        rounded[own] = _rounded(flat[own], drawn[at : at + own.stop - own.start], narrow.dtype)
    narrow.copy_(rounded.view(wide.shape))


def _rounded(wide: Tensor, drawn: Tensor, format: torch.dtype) -> Tensor:
    """Add what was drawn below the last bit that stays, and cut off there."""
    kept = -(1 << _DROPPED[format])
    cut = (wide.view(torch.int32) + drawn).bitwise_and_(kept).view(torch.float32)
    if format is torch.float16:  # below its smallest normal number, float16 has the same step everywhere
        share = drawn.float().mul_(2.0 ** -_DROPPED[format])
        even = wide.div(_STEP).add_(share).floor_().mul_(_STEP)
        cut = torch.where(wide.abs() < _SMALLEST_NORMAL, even, cut)
    return cut.to(format)
