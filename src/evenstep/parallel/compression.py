"""How a bucket of gradients travels: as it is, or cast to 16 bits to halve what goes over the wire.

Cast gradients are also summed in 16 bits, so with unit roundoff ε each component of the sum of R ranks is off by at
most ((1 + ε)ᴿ - 1)·Σᵣ|gᵣ|. All ranks use the sum that came off the wire, so replicas stay equal. It is not a loss
scale: a component that leaves the range of the format is lost, or is inf.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from evenstep.arguments import format_name
from evenstep.errors import ArgumentError


class Compression:
    """Gradients travel as they are.

    >>> Compression().pack([torch.ones(2), torch.zeros(1)])
    tensor([1., 1., 0.])
    """

    advice: str = ""
    """Said when the gradients themselves are finite and their sum was not."""

    def check(self, dtypes: Sequence[torch.dtype]) -> None:
        """Raise ArgumentError for parameters whose gradients cannot travel like this."""

    def pack(self, gradients: Sequence[Tensor]) -> Tensor:
        """One flat tensor to be summed over ranks.

        Args:
            gradients: flat, of one dtype.
        """
        return torch.cat(list(gradients))

    def unpack(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum as gradients are held.

        Args:
            total: what the sum over ranks of what `pack` gave has become.
        """
        return total


class _Cast(Compression):
    wire: torch.dtype

    def check(self, dtypes: Sequence[torch.dtype]) -> None:
        other = [dtype for dtype in dtypes if dtype not in (torch.float32, torch.float64, self.wire)]
        if other:
            wire = format_name(self.wire)
            raise ArgumentError(
                f"gradients that travel as {wire} must be of float32, float64 or {wire}, but the model has parameters "
                f"of {format_name(other[0])}; set `parallel.compression` to none."
            )

    def pack(self, gradients: Sequence[Tensor]) -> Tensor:
        first = gradients[0]
        flat = torch.empty(sum(map(torch.numel, gradients)), dtype=self.wire, device=first.device)
        for room, gradient in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True):
            room.copy_(gradient)  # casts on the way: no second buffer of full width
        return flat

    def unpack(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return total.to(dtype)


@final
class Bf16(_Cast):
    """Gradients travel as bfloat16: ε = 2⁻⁸ = 0.4 %, the range of float32.

    >>> wire = Bf16()
    >>> wire.unpack(wire.pack([torch.tensor([1.001, 1e30])]), torch.float32)[0]
    tensor(1.)
    """

    wire = torch.bfloat16
    advice = (
        "the gradients of this update are finite, but their sum over ranks in bf16 is not; set `parallel.compression` "
        "to none"
    )


@final
class Fp16(_Cast):
    """Gradients travel as float16: ε = 2⁻¹¹ = 0.05 %, from 6e-8 (smaller ones are lost) to 65504 (larger ones are inf).

    A sum that overflows is seen like any gradient that is not finite: the update is aborted on all ranks.

    >>> Fp16().pack([torch.tensor([1.0, 7e4, 1e-8])])
    tensor([1., inf, 0.], dtype=torch.float16)
    """

    wire = torch.float16
    advice = (
        "the gradients of this update are finite, but as fp16, in which they are summed over ranks, numbers above "
        "65504 are inf; set `parallel.compression` to bf16 or none, or clip what makes them so large"
    )


COMPRESSIONS: Mapping[str, Callable[[], Compression]] = {"none": Compression, "bf16": Bf16, "fp16": Fp16}
