"""Precisions: the number formats in which a model computes."""

from collections.abc import Mapping

from evenstep.precision.float8_mixed import Float8Mixed
from evenstep.precision.precision import (
    Bf16Mixed,
    Bf16NoMaster,
    Bf16True,
    Fp16Mixed,
    Fp16NoMaster,
    Fp16True,
    FullPrecision,
    LossScaled,
    Precision,
    SixteenBits,
)

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
