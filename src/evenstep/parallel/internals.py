"""What is used of FSDP2 that torch does not promise to keep, each with the reason; nothing else here asks for it.

It was found in torch 2.11 to 2.13. `tests/unit/parallel/test_internals.py` fails when torch changes any of it.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that FSDP2 gathers at once, by name; the outermost, "", first."""
    from torch.distributed.fsdp import FSDPModule

    return ((name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule))


def state(part: Any) -> Any:
    """FSDP2's state of a part: there is no public way to reduce outside of a backward, or to forget passes."""
    return part._get_fsdp_state()


def record(part: Any) -> Any | None:
    """FSDP2's record of a part's parameters, in which it keeps gradients before their reduction; None without any."""
    return next(iter(state(part)._fsdp_param_groups), None)


def forget_order(root: Any) -> None:
    """Forget in which order earlier passes went forward: FSDP2 would gather the next one's parts by it."""
    of_root = state(root)
    for one in of_root._state_ctx.all_states:
        for group in one._fsdp_param_groups:
            group._post_forward_indices.clear()
    if of_root._state_ctx.all_states:
        of_root._comm_ctx.post_forward_order.clear()


def begin(root: Any) -> None:
    """Make ready what FSDP2 makes in its first forward, for ranks that reduce before they have run any."""
    state(root)._lazy_init()


def has_begun(root: Any) -> bool:
    """Whether any pass has gone through the root."""
    return bool(state(root)._state_ctx.all_states)


def end_backward(root: Any) -> None:
    """Do what FSDP2 does at the end of a backward: reduce what is not reduced yet, and wait for all that is."""
    state(root)._root_post_backward_final_callback()


def forget_gathers(root: Any) -> None:
    """Forget gathers that were begun and will not end: FSDP2 would wait for them before it forgets anything."""
    for one in state(root)._state_ctx.all_states:
        for group in one._fsdp_param_groups:
            group._all_gather_result = None


def at_end_of_backward(part: Any, act: Callable[[], None]) -> None:
    """Call `act` when all gradients of a backward have come, before FSDP2 does its rest: hooks only see one tensor."""
    of_part = state(part)
    rest = of_part._root_post_backward_final_callback

    def ends() -> None:
        act()
        rest()

    of_part._root_post_backward_final_callback = ends


def choose_formats(part: Any) -> None:
    """Choose a part's number formats anew: FSDP2 has done so once, by what was trained in its first pass."""
    if (group := record(part)) is not None:
        group._init_mp_dtypes()


def collectives(group: Any) -> tuple[Any, Any]:
    """How FSDP2 gathers and how it reduces a part: it takes others', but does not give its own."""
    return group._all_gather_comm, group._reduce_scatter_comm


def gather_now(group: Any) -> None:
    """Gather a part as peers do, and leave it as it was; by itself FSDP2 does not gather what is gathered."""
    group.wait_for_unshard()
    kept = group.is_unsharded
    group._to_sharded()
    group.unshard()
    group.wait_for_unshard()
    if not kept:
        group._to_sharded()


def reduce_now(group: Any) -> None:
    """Reduce a part's gradients, or zeros, as at the end of its backward."""
    group.post_backward()


def leave_inputs_alone(part: Any) -> None:
    """Let a part use its inputs themselves.

    To find the end of a part's backward, FSDP2 passes its inputs through an identity, in which autograd sums what comes
    back from several uses of one input within the part before it adds what comes from elsewhere: other bits than
    without it. Here the end is found by hooks, which change nothing. An input that others use as well gets its gradient
    later, and a leaf, as in a re-entrant checkpoint, may get it before the part is through: then the part stays
    gathered until the backward ends.
    """
    group = record(part)

    def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.is_grad_enabled():
            return args, kwargs
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad]
        inputs = {id(one): one for one in tensors}
        if any(one.is_leaf for one in inputs.values()):
            return args, kwargs
        countdown = _countdown(len(inputs), cast("Any", group).post_backward)
        for one in inputs.values():
            one.register_hook(countdown)
        return args, kwargs

    if group is not None:
        group._register_post_backward_hook = watch


def _countdown(count: int, act: Callable[[], None]) -> Callable[[Tensor], None]:
    left = count

    def arrived(gradient: Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            left = count
            act()

    return arrived
