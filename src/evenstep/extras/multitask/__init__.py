"""Training several tasks by more than a sum: methods for their gradients, scheduled and learned coefficients."""

from collections.abc import Callable, Mapping

from evenstep.extras.multitask.aligned_mtl import AlignedMtl
from evenstep.extras.multitask.grad_norm import GradNorm
from evenstep.extras.multitask.pc_grad import PcGrad
from evenstep.extras.multitask.scheduled import Scheduled
from evenstep.extras.multitask.uncertainty import Uncertainty
from evenstep.train.tasks.combine import Combine, Separate

COMBINES: Mapping[str, Callable[..., Combine]] = {
    "separate": Separate,
    "pc_grad": PcGrad,
    "aligned_mtl": AlignedMtl,
    "grad_norm": GradNorm,
}

__all__ = ["COMBINES", "AlignedMtl", "GradNorm", "PcGrad", "Scheduled", "Uncertainty"]
