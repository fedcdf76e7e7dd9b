"""Parameters that FSDP2 can cut into shards."""

from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.internals import has_gradient_hooks


def check_shardable(module: nn.Module) -> None:
    """Raise ArgumentError for a parameter with a hook, which shards would not call.

    >>> line = nn.Linear(1, 1); _ = line.weight.register_hook(print)
    >>> check_shardable(line)
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: parameter `weight` has a hook (`register_hook`), which `fsdp` would not call; ...
    """
    for name, one in module.named_parameters():
        if cuttable(one) and has_gradient_hooks(one):
            raise ArgumentError(
                f"parameter `{name}` has a hook (`register_hook`), which `fsdp` would not call; change the gradient in "
                f"the forward (`torch.autograd.Function`), or use `ddp` or `zero1`.",
                field=name,
            )


def cuttable(parameter: Tensor) -> bool:
    """Return True for a parameter that ranks can hold parts of.

    >>> import torch
    >>> cuttable(torch.zeros(3)), cuttable(torch.zeros(())), cuttable(torch.zeros(0, 3))
    (True, False, False)
    """
    return parameter.ndim > 0 and parameter.numel() > 0 and not getattr(parameter, "stays_whole", False)
