"""The optimizer of a run: a class of `torch.optim`, or what the recipe names.

It decides only what the run file leaves open.
"""

import torch
from torch import nn

from evenstep.config.arguments import Call
from evenstep.errors import ConfigError, TaskError, clause
from evenstep.optim.sharing import TORCH
from evenstep.train.arguments import check_model


def build_optimizer(
    call: Call, model: nn.Module, lr: float, *, fuse: bool = True, shards: bool = False
) -> torch.optim.Optimizer:
    """The optimizer: a class is called with the parameters that are trained, any other callable with the model.

    A class of `torch.optim` that can do its work in one fused kernel is told to, unless its arguments say otherwise:
    loss scale, clipping and the check for finite gradients then cost nothing extra.

    Args:
        call: what the run file names, with its arguments.
        lr: the peak learning rate.
        fuse: False where the bits of a step must not depend on how tensors are sharded, on a CPU.
        shards: whether each rank steps a part of every parameter, for which not all fused kernels are made.

    Raises:
        TaskError: there is nothing to train, or it is no optimizer.
        ConfigError: arguments that a class of torch does not take.
    """
    check_model(model)
    if isinstance(call.function, type):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # a rank of a pipeline may have nothing to train, which optimizers take as an empty group only
        trained = parameters or [{"params": []}]
        try:
            made: object = call(trained, lr=lr, **(_fused(call, model, shards) if fuse else {}))
        except (TypeError, ValueError, RuntimeError) as error:
            if call.function.__module__.partition(".")[0] != "torch":
                raise
            name = call.function.__name__
            raise ConfigError(
                [f"`optimizer.args` can't be for `{name}`, which raised {clause(error)}; change them."]
            ) from error
    else:
        made = call(model, lr=lr)
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(f"`optimizer.target` must give a torch.optim.Optimizer, but gave a {type(made).__name__}.")
    return made


def _fused(call: Call, model: nn.Module, shards: bool) -> dict[str, bool]:
    fusible = [
        kind
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
        if not (shards and "fused" in TORCH[kind].unless)
    ]
    decided = {"fused", "foreach", "capturable", "differentiable"} & call.arguments.keys()
    dense = all(parameter.is_floating_point() for parameter in model.parameters()) and not any(
        getattr(module, "sparse", False) for module in model.modules()
    )
    return {"fused": True} if call.function in fusible and not decided and dense else {}
