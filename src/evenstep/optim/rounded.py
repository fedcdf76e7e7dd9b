"""Without master weights: each step is made in float32 and rounded back into the parameters at random.

θ ← Optimizer(p, g, …) in float32,   p ← one of θ's two neighbours, with mean θ
"""

import math
from collections.abc import Callable, Mapping
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.internals import local_tensor
from evenstep.keys import branch, branch_below, key_below
from evenstep.optim.optimizers import is_torchs
from evenstep.optim.stepper import Stepper, is_narrow

PIECE_BYTES = 64 * 2**20  # of float32 copies at a time; a larger parameter is one piece


@final
class RoundedStepper(Stepper):
    """Steps parameters of 16 bits in float32, and rounds them stochastically.

    Stand-ins are made for a few parameters at a time, to save memory. Only torch's own optimizers step in pieces.

    Args:
        names: names of parameters, by their `id`.
        first_element: offset of this rank's shard in the whole tensor, in elements.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        *,
        seed: int,
        first_element: Callable[[Tensor], int],
    ) -> None:
        super().__init__(optimizer)
        self._widen_state()
        self._names = names
        self._branch = branch(seed, "rounding")
        self._first_element = first_element
        in_pieces = all(map(is_torchs, self.optimizers))
        self._pieces: list[list[nn.Parameter]] = [[]]
        room = PIECE_BYTES
        for parameter in self.parameters:
            size = 4 * local_tensor(parameter).numel() if is_narrow(parameter) else 0
            if in_pieces and self._pieces[-1] and size > room:
                self._pieces.append([])
                room = PIECE_BYTES
            self._pieces[-1].append(parameter)
            room -= size

    def _step(self, update: int) -> None:
        branch_of_update = branch_below(self._branch, update)
        for number, piece in enumerate(self._pieces):
            pairs = [(one, _widened(one)) for one in piece if one.grad is not None]
            self._step_stand_ins(pairs, begun=number > 0)
            for parameter, stand_in in pairs:
                if stand_in is parameter:
                    continue
                with torch.no_grad():
                    round_into(
                        local_tensor(parameter),
                        local_tensor(stand_in),
                        branch=branch_below(branch_of_update, self._names[id(parameter)]),
                        first=self._first_element(parameter),
                        size=parameter.numel(),
                    )


def _widened(parameter: nn.Parameter) -> nn.Parameter:
    if not is_narrow(parameter):
        return parameter
    made = nn.Parameter(parameter.detach().float(), requires_grad=False)
    made.grad = cast("Tensor", parameter.grad).float()
    return made


_BLOCK = 1 << 22  # elements drawn by one seed
_SMALLEST_NORMAL, _STEP = 2.0**-14, 2.0**-24  # of float16, and the distance of all below
_DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # bits of float32's mantissa that the format has not


def round_into(narrow: Tensor, wide: Tensor, *, branch: int, first: int = 0, size: int | None = None) -> None:
    """Round float32 numbers to 16 bits at random, each by a key of its place in the whole tensor.

    x between the neighbours a < b becomes b with probability (x - a)/(b - a), so the mean is x.

    Args:
        narrow: the result, changed in place.
        branch: branch of the key (`evenstep.keys.branch`).
        first: offset of `wide` in the whole tensor, in elements, which has `size`.
    """
    flat = wide.reshape(-1)
    rounded = torch.empty_like(flat, dtype=narrow.dtype)
    generator = torch.Generator(flat.device)
    last = first + flat.numel()
    whole = flat.numel() if size is None else size
    bits = 0xFFFFFFFF if flat.device.type == "cpu" else -1
    for block in range(first // _BLOCK, math.ceil(last / _BLOCK)):
        begin = block * _BLOCK
        end = min(begin + _BLOCK, whole)
        generator.manual_seed(key_below(branch, block) & bits)
        drawn = torch.empty(end - begin, dtype=torch.int32, device=flat.device)
        drawn.random_(0, 1 << _DROPPED[narrow.dtype], generator=generator)
        own_begin, own_end = max(begin, first), min(end, last)
        own = slice(own_begin - first, own_end - first)
        rounded[own] = _rounded(flat[own], drawn[own_begin - begin : own_end - begin], narrow.dtype)
    narrow.copy_(rounded.view(wide.shape))


def _rounded(wide: Tensor, drawn: Tensor, format: torch.dtype) -> Tensor:
    kept = -(1 << _DROPPED[format])
    cut = (wide.view(torch.int32) + drawn).bitwise_and_(kept).view(torch.float32)
    if format is torch.float16:  # below its smallest normal number, float16 has the same step everywhere
        share = drawn.float().mul_(2.0 ** -_DROPPED[format])
        even = wide.div(_STEP).add_(share).floor_().mul_(_STEP)
        cut = torch.where(wide.abs() < _SMALLEST_NORMAL, even, cut)
    return cut.to(format)
