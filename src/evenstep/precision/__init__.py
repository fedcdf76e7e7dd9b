"""Precision modes: in which number formats a model computes; one file each."""

from evenstep.precision.bf16_mixed import Bf16Mixed
from evenstep.precision.fp16_mixed import Fp16Mixed
from evenstep.precision.full import Full
from evenstep.precision.precision import Precision

__all__ = ["Bf16Mixed", "Fp16Mixed", "Full", "Precision"]
