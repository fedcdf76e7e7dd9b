"""Precisions: the number formats in which a model computes."""

from collections.abc import Mapping

from evenstep.precision.float8 import Float8Mixed
from evenstep.precision.precision import (
    Bf16Mixed,
    Bf16NoMaster,
    Bf16True,
    Fp16Mixed,
    Fp16NoMaster,
    Fp16True,
    FullPrecision,
    LossScale,
    LossScaled,
    Precision,
    SixteenBits,
)

PRECISIONS: Mapping[str, type[Precision]] = {
    kind.name: kind
    for kind in (FullPrecision, Bf16Mixed, Fp16Mixed, Float8Mixed, Bf16True, Fp16True, Bf16NoMaster, Fp16NoMaster)
}
"""Precisions by their name in run files."""

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
    "LossScale",
    "LossScaled",
    "Precision",
    "SixteenBits",
]
