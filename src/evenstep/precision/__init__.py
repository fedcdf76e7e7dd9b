"""Precision modes: in which number formats a model computes; one file each."""

from collections.abc import Mapping

from evenstep.precision.bf16_mixed import Bf16Mixed
from evenstep.precision.bf16_no_master import Bf16NoMaster
from evenstep.precision.bf16_true import Bf16True
from evenstep.precision.float8_mixed import Float8Mixed
from evenstep.precision.fp16_mixed import Fp16Mixed
from evenstep.precision.fp16_no_master import Fp16NoMaster
from evenstep.precision.fp16_true import Fp16True
from evenstep.precision.full import FullPrecision
from evenstep.precision.loss_scale import LossScaled
from evenstep.precision.precision import Precision
from evenstep.precision.sixteen_bits import SixteenBits

PRECISIONS: Mapping[str, type[Precision]] = {
    "32-true": FullPrecision,
    "bf16-mixed": Bf16Mixed,
    "16-mixed": Fp16Mixed,
    "float8-mixed": Float8Mixed,
    "bf16-true": Bf16True,
    "16-true": Fp16True,
    "bf16-true-no-master": Bf16NoMaster,
    "16-true-no-master": Fp16NoMaster,
}

__all__ = [
    "PRECISIONS",
    "Bf16Mixed",
    "Bf16NoMaster",
    "Bf16True",
    "Float8Mixed",
    "Fp16Mixed",
    "Fp16NoMaster",
    "Fp16True",
    "FullPrecision",
    "LossScaled",
    "Precision",
    "SixteenBits",
]
