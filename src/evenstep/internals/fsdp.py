"""Private names of FSDP2, as found in torch 2.13 and newer."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.internals import pytree

_BACKWARD_HOOKS = attrgetter("_backward_hooks")


def parts(module: nn.Module) -> Iterator[Any]:
    """Modules that FSDP2 gathers as units; the outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return (part for part in module.modules() if isinstance(part, FSDPModule))


def class_before_sharding(module: nn.Module) -> Any:
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return next(base for base in kind.__bases__ if base is not FSDPModule) if isinstance(module, FSDPModule) else kind


def records(root: Any) -> Iterator[Any]:
    """FSDP2's records of the parameters of all units that have some."""
    for part in parts(root):
        yield from part._get_fsdp_state()._fsdp_param_groups


def begin(root: Any) -> None:
    """Initialise FSDP2 as its first forward does: a rank may reduce, or reset, before any forward."""
    root._get_fsdp_state()._lazy_init()


def forget_gathers(root: Any) -> None:
    """Forget gathers that will not end, for which FSDP2 would wait."""
    for group in records(root):
        group._all_gather_result = None


def set_gradient(shard: Any, local: Tensor) -> None:
    """Make `local` this rank's part of the gradient, where its part of the parameter is."""
    from torch.distributed.tensor import DTensor

    live = shard.sharded_param
    if local.dtype == live.dtype:
        live.grad = shard.to_sharded_dtensor(local.to(live.device))
    else:  # FSDP2's own description of a shard has the parameter's format
        live.grad = DTensor.from_local(
            local, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
        )


def watch_calls(root: Any, called: Callable[[int], None], ended: Callable[[int], None]) -> None:
    """Report calls of units and ends of their backwards, by number; found by hooks on inputs, not FSDP2's identity.

    Autograd would sum the gradients of an input's uses inside that identity first, which gives other bits. A leaf, or
    an input that is an output of the same unit, may get its gradient before the unit's backward is over: then the unit
    stays gathered until the whole backward ends. An input that the unit returns unchanged is not one of its outputs.
    """
    number = 0
    for part in parts(root):
        state = part._get_fsdp_state()
        for group in state._fsdp_param_groups:
            _watch_calls(state, group, partial(called, number), partial(ended, number))
            number += 1


def _watch_calls(state: Any, group: Any, called: Callable[[], None], ended: Callable[[], None]) -> None:
    begin_backward, look_at_outputs = state._pre_backward, state._register_pre_backward_hook
    given: list[weakref.ref[Any]] = []

    def end() -> None:
        group.post_backward()
        ended()

    def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        called()
        given.clear()
        if not torch.is_grad_enabled():
            return args, kwargs
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad]
        inputs = {id(one): one for one in tensors}
        given[:] = map(weakref.ref, inputs.values())
        own = any(begin_backward in (_BACKWARD_HOOKS(one) or {}).values() for one in inputs.values())
        if own or any(one.is_leaf for one in inputs.values()):
            return args, kwargs
        countdown = _countdown(len(inputs), end)
        for one in inputs.values():
            one.register_hook(countdown)
        return args, kwargs

    def look(output: Any) -> Any:
        passed = [one() for one in given]
        leaves = pytree.tree_leaves(output)
        made = [leaf for leaf in leaves if not any(leaf is one for one in passed)]
        if len(made) == len(leaves):
            return look_at_outputs(output)
        look_at_outputs(made)
        return output

    group._register_post_backward_hook = watch
    state._register_pre_backward_hook = look


def _countdown(count: int, act: Callable[[], None]) -> Callable[[Tensor], None]:
    left = count

    def arrived(gradient: Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            left = count
            act()

    return arrived
