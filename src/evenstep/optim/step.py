"""Takes an optimizer's step, once more if memory ran out before it had changed anything.

If the tensors' version counters show that nothing was written, unused memory is freed and the step is repeated.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from evenstep.errors import ArgumentError, OutOfMemoryError
from evenstep.internals import takes_scale, times_written
from evenstep.oom import give_back, is_out_of_memory
from evenstep.optim.fused import take_step
from evenstep.optim.multi import inner
from evenstep.tensors import parameters_in


def step(optimizer: Any) -> None:
    """Take the step.

    Args:
        optimizer: any of torch.optim, or with its interface; its kernels' `grad_scale` and `found_inf` are set.

    Raises:
        OutOfMemoryError: there is no room for the step, or it broke off half-way; the message says which.
    """
    if optimizer.state and takes_scale(optimizer):
        take_step(optimizer)  # one kernel, which allocates nothing: no need to look at every tensor before
        return
    before = _versions(optimizer)
    fault = _tried(optimizer)
    if not fault:
        return
    give_back()
    if not _untouched(optimizer, before):
        raise OutOfMemoryError(
            f"memory ran out in the midst of the optimizer's step ({fault}): some parameters are changed, others not. "
            f"Resume from the last checkpoint with smaller micro-batches or a fused optimizer."
        )
    fault = _tried(optimizer)
    if fault:
        raise OutOfMemoryError(
            f"there is no memory for the optimizer's step ({fault}); nothing was changed. Use smaller micro-batches, "
            f"a fused optimizer, or one with less state."
        )


def _tried(optimizer: Any) -> str:
    try:
        take_step(optimizer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def _tensors(optimizer: Any) -> list[Tensor]:
    parameters = parameters_in(optimizer)
    return [*parameters, *_tensors_in(optimizer.state)]


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    parts = tree.values() if isinstance(tree, Mapping) else tree
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, dict | list | tuple):
            yield from _tensors_in(part)


def _versions(optimizer: Any) -> dict[int, int]:
    return {id(tensor): times_written(tensor) for tensor in _tensors(optimizer)}


def _untouched(optimizer: Any, before: dict[int, int]) -> bool:
    return all(times_written(tensor) == before.get(id(tensor), 0) for tensor in _tensors(optimizer))


def let_begin_late(optimizer: Optimizer) -> None:
    """Make momentum of 0 for parameters of fused SGDs whose first gradient comes after that of others.

    The kernel takes no parameter without momentum beside one with it. From 0, the first momentum is the gradient.
    """
    for one in inner(optimizer):
        if isinstance(one, SGD) and any(group.get("fused") for group in one.param_groups):
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
                f"fused SGD can't step with a `dampening`; build it with `fused=False`.",
                field="optimizer",
            )
        for one in late:
            optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)
