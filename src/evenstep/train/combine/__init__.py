"""Ways of combining the tasks' separate gradients into one, one file each."""

from collections.abc import Callable, Mapping

from evenstep.train.combine.aligned_mtl import AlignedMtl
from evenstep.train.combine.combine import Combine, Separate, Shares
from evenstep.train.combine.grad_norm import GradNorm
from evenstep.train.combine.pc_grad import PcGrad

COMBINES: Mapping[str, Callable[..., Combine]] = {
    "separate": Separate,
    "pc_grad": PcGrad,
    "aligned_mtl": AlignedMtl,
    "grad_norm": GradNorm,
}

__all__ = ["COMBINES", "AlignedMtl", "Combine", "GradNorm", "PcGrad", "Separate", "Shares"]
