"""Precision modes: in which number formats a model computes; one file each."""

from collections.abc import Callable, Mapping

from evenstep.precision.bf16_mixed import Bf16Mixed
from evenstep.precision.fp16_mixed import Fp16Mixed
from evenstep.precision.full import FullPrecision
from evenstep.precision.precision import Precision
from evenstep.renamed import old_names

PRECISIONS: Mapping[str, Callable[..., Precision]] = {
    "32-true": FullPrecision,
    "bf16-mixed": Bf16Mixed,
    "16-mixed": Fp16Mixed,
}

__all__ = ["PRECISIONS", "Bf16Mixed", "Fp16Mixed", "FullPrecision", "Precision"]

__getattr__ = old_names(__name__, {"Full": "FullPrecision"})
