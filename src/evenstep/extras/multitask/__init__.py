"""Training several tasks by more than a sum: methods for their gradients, scheduled and learned coefficients."""

from typing import TYPE_CHECKING, Any

from evenstep.lazy import LazyTable, lazy_names

if TYPE_CHECKING:
    from evenstep.extras.multitask.aligned_mtl import AlignedMtl
    from evenstep.extras.multitask.grad_norm import GradNorm
    from evenstep.extras.multitask.pc_grad import PcGrad
    from evenstep.extras.multitask.scheduled import Scheduled
    from evenstep.extras.multitask.uncertainty import Uncertainty

COMBINES = LazyTable[Any](
    {
        "separate": "evenstep.train.tasks.combine:Separate",
        "pc_grad": "evenstep.extras.multitask.pc_grad:PcGrad",
        "aligned_mtl": "evenstep.extras.multitask.aligned_mtl:AlignedMtl",
        "grad_norm": "evenstep.extras.multitask.grad_norm:GradNorm",
    }
)

__all__ = ["COMBINES", "AlignedMtl", "GradNorm", "PcGrad", "Scheduled", "Uncertainty"]

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
