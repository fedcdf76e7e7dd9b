"""Private names of FSDP2, as found in torch 2.13 and newer."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from evenstep.internals import pytree

_BACKWARD_HOOKS = attrgetter("_backward_hooks")


def parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules that FSDP2 gathers as units, by name; the outermost, "", first."""
    from torch.distributed.fsdp import FSDPModule

    return ((name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule))


def class_before_sharding(module: nn.Module) -> Any:
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return next(base for base in kind.__bases__ if base is not FSDPModule) if isinstance(module, FSDPModule) else kind


def state(part: Any) -> Any:
    """FSDP2's state of a unit; there is no public way to reduce outside of a backward, or to forget passes."""
    return part._get_fsdp_state()


def record(part: Any) -> Any | None:
    """FSDP2's record of a unit's parameters, which holds gradients before their reduction; None without parameters."""
    return next(iter(state(part)._fsdp_param_groups), None)


def records(root: Any) -> Iterator[Any]:
    """Records of all units with parameters."""
    return (one for _, part in parts(root) if (one := record(part)) is not None)


def forget_order(root: Any) -> None:
    """Forget the order of earlier forwards, by which FSDP2 would prefetch."""
    for group in records(root):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def begin(root: Any) -> None:
    """Initialise FSDP2 as its first forward does: a rank may reduce, or reset, before any forward."""
    state(root)._lazy_init()


def end_backward(root: Any) -> None:
    """Reduce remaining gradients and wait for all reductions, as FSDP2 does at the end of a backward."""
    of_root = state(root)
    # since torch 2.15 the beginning of a backward decides who ends it; here there may have been none
    if getattr(of_root._state_ctx, "manual_backward_finalization_active", False) is None:
        of_root._state_ctx.manual_backward_finalization_active = False
    of_root._root_post_backward_final_callback()


def forget_gathers(root: Any) -> None:
    """Forget gathers that will not end, for which FSDP2 would wait."""
    for group in records(root):
        group._all_gather_result = None


def choose_formats(group: Any) -> None:
    group._init_mp_dtypes()


def count_collectives(root: Any, count: Callable[[int], None]) -> None:
    """Call `count` before each collective with twice the number of its unit, plus 1 for reductions."""
    for number, group in enumerate(records(root)):
        group._all_gather_comm = _Counted(group._all_gather_comm, partial(count, 2 * number), by_call=True)
        # without sharding nothing is scattered, but memory for the sum is allocated
        group._reduce_scatter_comm = _Counted(group._reduce_scatter_comm, partial(count, 2 * number + 1), by_call=False)


class _Counted:
    def __init__(self, inner: Any, count: Callable[[], None], *, by_call: bool) -> None:
        self._inner, self._count, self._by_call = inner, count, by_call

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self._by_call:
            self._count()
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._by_call:
            self._count()
        return self._inner(*args, **kwargs)


def gradient_of(shard: Any) -> Tensor | None:
    """Gradient before its reduction, in the format of autograd or of the reduction.

    Before torch 2.15 FSDP2 keeps sums over backwards beside `.grad`; since then they are in `.grad`.
    """
    kept = shard.unsharded_accumulated_grad
    return shard.unsharded_param.grad if kept is None else kept


def forget_gradient(shard: Any) -> None:
    """Forget the gradient of `gradient_of`."""
    shard.unsharded_param.grad = None
    if _sums_beside(shard):
        shard.unsharded_accumulated_grad = None


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


def add_late_gradient(shard: Any) -> None:
    """Add the `.grad` after a backward to the sum over backwards, as FSDP2 does at the end of a backward."""
    if _sums_beside(shard):
        shard.accumulate_unsharded_grad_if_needed()
        shard.to_accumulated_grad_if_needed()


def complete_sums(group: Any) -> None:
    """Create sums of 0 for parameters without a gradient beside parameters with one.

    Before torch 2.15 FSDP2 fails if sums are in a wider format (https://github.com/pytorch/pytorch/issues/196996).
    """
    shards = [one for one in group.fsdp_params if _sums_beside(one)]
    if all(shard.unsharded_accumulated_grad is None for shard in shards):
        return
    for shard in shards:
        if shard.unsharded_accumulated_grad is None and shard.unsharded_param.requires_grad:
            shard.unsharded_accumulated_grad = torch.zeros_like(shard.unsharded_param, dtype=shard.reduce_dtype)


def _sums_beside(shard: Any) -> bool:
    return "unsharded_accumulated_grad" in vars(shard)


def leave_inputs_alone(part: Any) -> None:
    """Find the end of a unit's backward by hooks on its inputs, instead of FSDP2's identity around them.

    Autograd would sum the gradients of an input's uses inside that identity first, which gives other bits. A leaf, or
    an input that is an output of the same unit, may get its gradient before the unit's backward is over: then the unit
    stays gathered until the whole backward ends. An input that the unit returns unchanged is not one of its outputs.
    """
    group, of_part = record(part), state(part)
    begin_backward, look_at_outputs = of_part._pre_backward, of_part._register_pre_backward_hook
    given: list[weakref.ref[Any]] = []

    def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given.clear()
        if not torch.is_grad_enabled():
            return args, kwargs
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad]
        inputs = {id(one): one for one in tensors}
        given[:] = map(weakref.ref, inputs.values())
        own = any(begin_backward in (_BACKWARD_HOOKS(one) or {}).values() for one in inputs.values())
        if own or any(one.is_leaf for one in inputs.values()):
            return args, kwargs
        countdown = _countdown(len(inputs), cast("Any", group).post_backward)
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

    if group is not None:
        group._register_post_backward_hook = watch
        of_part._register_pre_backward_hook = look


def _countdown(count: int, act: Callable[[], None]) -> Callable[[Tensor], None]:
    left = count

    def arrived(gradient: Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            left = count
            act()

    return arrived
