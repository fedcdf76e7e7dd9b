"""What is used of FSDP2 beside its public names, of torch 2.13 and newer."""

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
    """The modules that FSDP2 gathers at once, by name; the outermost, "", first."""
    from torch.distributed.fsdp import FSDPModule

    return ((name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule))


def class_before_sharding(module: nn.Module) -> Any:
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return next(base for base in kind.__bases__ if base is not FSDPModule) if isinstance(module, FSDPModule) else kind


def state(part: Any) -> Any:
    """FSDP2's state of a part: there is no public way to reduce outside of a backward, or to forget passes."""
    return part._get_fsdp_state()


def record(part: Any) -> Any | None:
    """FSDP2's record of a part's parameters, in which it keeps gradients before their reduction; None without any."""
    return next(iter(state(part)._fsdp_param_groups), None)


def records(root: Any) -> Iterator[Any]:
    """The records of all parts that have parameters."""
    return (one for _, part in parts(root) if (one := record(part)) is not None)


def forget_order(root: Any) -> None:
    """Forget in which order earlier passes went forward: FSDP2 would gather the next one's parts by it."""
    for group in records(root):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def begin(root: Any) -> None:
    """Make ready what FSDP2 makes in its first forward: a rank may reduce, or reset, before it has run any."""
    state(root)._lazy_init()


def end_backward(root: Any) -> None:
    """Do what FSDP2 does at the end of a backward: reduce what is not reduced yet, and wait for all that is.

    Since torch 2.15 it asks who ends the backward, which is decided when one begins; none need have begun here.
    """
    of_root = state(root)
    if getattr(of_root._state_ctx, "manual_backward_finalization_active", False) is None:
        of_root._state_ctx.manual_backward_finalization_active = False
    of_root._root_post_backward_final_callback()


def forget_gathers(root: Any) -> None:
    """Forget gathers that were begun and will not end: FSDP2 would wait for them before it forgets anything."""
    for group in records(root):
        group._all_gather_result = None


def choose_formats(group: Any) -> None:
    group._init_mp_dtypes()


def count_collectives(root: Any, count: Callable[[int], None]) -> None:
    """Call `count` with a number before each collective: twice that of its part, plus 1 where it reduces."""
    for number, group in enumerate(records(root)):
        group._all_gather_comm = _Counted(group._all_gather_comm, partial(count, 2 * number), by_call=True)
        # where every rank holds all, nothing is scattered, but room for the sum is asked for
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
    """The gradient that FSDP2 has kept from reduction: as autograd left it, or already in the format to reduce in.

    Before torch 2.15 it keeps sums over backwards in that format beside `.grad`; since then all are in `.grad`.
    """
    kept = shard.unsharded_accumulated_grad
    return shard.unsharded_param.grad if kept is None else kept


def forget_gradient(shard: Any) -> None:
    """Forget what `gradient_of` would give."""
    shard.unsharded_param.grad = None
    if _sums_beside(shard):
        shard.unsharded_accumulated_grad = None


def set_gradient(shard: Any, local: Tensor) -> None:
    """Make `local` this rank's part of the gradient, where its part of the parameter is."""
    live = shard.sharded_param
    live.grad = shard.to_sharded_dtensor(local.to(live.device))


def add_late_gradient(shard: Any) -> None:
    """Add what came into `.grad` after a backward to its sum, as FSDP2 does at the end of one."""
    if _sums_beside(shard):
        shard.accumulate_unsharded_grad_if_needed()
        shard.to_accumulated_grad_if_needed()


def complete_sums(group: Any) -> None:
    """Let no part hold sums beside nothing: FSDP2 takes zeros in the gathered format for what has no gradient.

    Before torch 2.15 it then fails where sums are in a wider one (https://github.com/pytorch/pytorch/issues/196996).
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
    """Let a part use its inputs themselves.

    To find the end of a part's backward, FSDP2 passes its inputs through an identity, in which autograd sums what comes
    back from several uses of one input within the part before it adds what comes from elsewhere: other bits than
    without it. Here the end is found by hooks, which change nothing. An input that others use as well gets its gradient
    later, and a leaf, as in a re-entrant checkpoint, may get it before the part is through: then the part stays
    gathered until the backward ends. So it does between two calls one of which takes what the other gives: where that
    gradient comes, FSDP2 has the earlier one begin, before hooks that were put there later. What a part gives back as
    it came, as a block that is skipped does, is none of its outputs: the part's backward need not begin with it.
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
