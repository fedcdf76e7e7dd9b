"""The optimizer of a run: a class of `torch.optim`, or what the recipe names.

It decides only what the run file leaves open.
"""

import torch
from torch import nn

from evenstep.config.arguments import Call
from evenstep.errors import TaskError
from evenstep.train.arguments import check_model


def build_optimizer(call: Call, model: nn.Module, lr: float, *, fuse: bool = True) -> torch.optim.Optimizer:
    """The optimizer: a class is called with the parameters that are trained, any other callable with the model.

    A class of `torch.optim` that can do its work in one fused kernel is told to, unless its arguments say otherwise:
    loss scale, clipping and the check for finite gradients then cost nothing extra.

    Args:
        call: what the run file names, with its arguments.
        model: whose parameters.
        lr: the peak learning rate.
        fuse: False where the bits of a step must not depend on how tensors are sharded, on a CPU.

    Raises:
        TaskError: there is nothing to train, or it is no optimizer.
    """
    check_model(model)
    if isinstance(call.function, type):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # a rank of a pipeline may have nothing to train, which optimizers take as an empty group only
        made: object = call(parameters or [{"params": []}], lr=lr, **(_fused(call, model) if fuse else {}))
    else:
        made = call(model, lr=lr)
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(f"`optimizer.target` must give a torch.optim.Optimizer, but gave a {type(made).__name__}.")
    return made


def _fused(call: Call, model: nn.Module) -> dict[str, bool]:
    fusible = call.function in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    decided = {"fused", "foreach", "capturable", "differentiable"} & call.arguments.keys()
    dense = all(parameter.is_floating_point() for parameter in model.parameters()) and not any(
        getattr(module, "sparse", False) for module in model.modules()
    )
    return {"fused": True} if fusible and not decided and dense else {}
