"""Which modules FSDP2 can shard, said before it does: what it gathers at once must be trained in one number format.

It does not choose units or formats.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError


def check_shardable(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ArgumentError for parameters that can't be in one unit, or in none.

    Args:
        module: of which what the units leave over is gathered together.
        units: parts of it that are gathered at once.

    >>> line = nn.Linear(1, 1); line.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    >>> check_shardable(nn.Sequential(line), [line])
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: parameters that are gathered at once must be trained in one number format, but ...
    """
    names = {id(one): name for name, one in module.named_parameters()}
    seen: set[int] = set()
    for unit in (*units, module):
        own = [one for one in unit.parameters() if id(one) not in seen and cuttable(one)]
        seen.update(map(id, own))
        trained = [one for one in own if one.requires_grad]
        for one in trained:
            name, first = names[id(one)], names[id(trained[0])]
            if one.is_complex():
                raise ArgumentError(
                    f"parameters that are cut over ranks must be real, but `{name}` is {_said(one)}; share gradients "
                    f"or optimizer state only, with `Ddp`, `Ordered` or `Zero1`, which take complex ones."
                )
            if one.dtype != trained[0].dtype:
                raise ArgumentError(
                    f"parameters that are gathered at once must be trained in one number format, but `{first}` is "
                    f"{_said(trained[0])} and `{name}` is {_said(one)}; give them one format, put them into different "
                    f"items of an `nn.ModuleList`, which are gathered one by one, or share gradients or optimizer "
                    f"state only, with `Ddp`, `Ordered` or `Zero1`."
                )


def cuttable(parameter: Tensor) -> bool:
    """Whether ranks can each hold a part of it: not of a single number, and not of none.

    >>> cuttable(torch.zeros(3)), cuttable(torch.zeros(())), cuttable(torch.zeros(0, 3))
    (True, False, False)
    """
    return parameter.ndim > 0 and parameter.numel() > 0


def check_steppable(whole: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for an optimizer that steps shards and the parameters `whole` in one kernel: none can."""
    ids = {id(one) for one in whole}
    for number, group in enumerate(optimizer.param_groups):
        kernel = next((name for name in ("foreach", "fused") if group.get(name)), None)
        stay = [one for one in group["params"] if id(one) in ids]
        if kernel and stay and len(stay) < len(group["params"]):
            raise ArgumentError(
                f"group {number} of the optimizer has `{kernel}=True`, and holds parameters that are cut over ranks "
                f"beside {len(stay)} that can't be (single numbers, or none), which one kernel does not take; leave "
                f"`{kernel}` out, or give those a group of their own."
            )


def _said(parameter: Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
