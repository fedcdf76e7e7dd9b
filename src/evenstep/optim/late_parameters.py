"""Lets torch's fused SGD step parameters that get their first gradient after others, as experts and unfrozen ones do.

Its kernel takes no parameter without momentum beside one that has some. A momentum of 0 is the same: what it makes of
it is the gradient, as of a first one. Other optimizers are left as they are.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.optim.multi import inner


def let_begin_late(optimizer: Optimizer) -> None:
    """Have momentum made for the parameters of fused SGDs that get their first gradient late."""
    for one in inner(optimizer):
        if isinstance(one, torch.optim.SGD) and any(group.get("fused") for group in one.param_groups):
            one.register_step_pre_hook(_begin_momentum)


def _begin_momentum(optimizer: Optimizer, *_: Any) -> None:
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        moving = [one for one in group["params"] if one.grad is not None]
        late = [one for one in moving if optimizer.state.get(one, {}).get("momentum_buffer") is None]
        if not late or len(late) == len(moving):
            continue
        if group["dampening"]:
            raise ArgumentError(
                f"a parameter of shape {list(late[0].shape)} has its first gradient later than others, which torch's "
                f"fused SGD can't step with a `dampening`; build it with `fused=False`."
            )
        for one in late:
            optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)
