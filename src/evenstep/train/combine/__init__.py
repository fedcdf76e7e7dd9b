"""Ways of combining the tasks' separate gradients into one, one file each."""

from evenstep.train.combine.aligned_mtl import AlignedMtl
from evenstep.train.combine.combine import Combine, Separate, Shares
from evenstep.train.combine.grad_norm import GradNorm
from evenstep.train.combine.pc_grad import PcGrad

__all__ = ["AlignedMtl", "Combine", "GradNorm", "PcGrad", "Separate", "Shares"]
