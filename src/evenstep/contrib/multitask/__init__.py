"""Training several tasks by more than a sum: methods for their gradients, scheduled and learned coefficients."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.contrib.multitask.aligned_mtl import AlignedMtl
    from evenstep.contrib.multitask.grad_norm import GradNorm
    from evenstep.contrib.multitask.pc_grad import PcGrad
    from evenstep.contrib.multitask.scheduled import Scheduled
    from evenstep.contrib.multitask.uncertainty import Uncertainty

COMBINES = {
    "separate": "evenstep.train.tasks.weighting:Separate",
    "pc_grad": "evenstep.contrib.multitask.pc_grad:PcGrad",
    "aligned_mtl": "evenstep.contrib.multitask.aligned_mtl:AlignedMtl",
    "grad_norm": "evenstep.contrib.multitask.grad_norm:GradNorm",
}
"""Classes by the words of `combine`, as "module:name"."""

COEFFICIENTS = {
    "scheduled": "evenstep.contrib.multitask.scheduled:Scheduled",
    "uncertainty": "evenstep.contrib.multitask.uncertainty:Uncertainty",
}
"""Classes by the words of `coefficients`, as "module:name"."""

__all__ = ["COEFFICIENTS", "COMBINES", "AlignedMtl", "GradNorm", "PcGrad", "Scheduled", "Uncertainty"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".aligned_mtl": "AlignedMtl",
        ".grad_norm": "GradNorm",
        ".pc_grad": "PcGrad",
        ".scheduled": "Scheduled",
        ".uncertainty": "Uncertainty",
    },
)
