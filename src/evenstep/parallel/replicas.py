"""Comparison of replicas: equal at the start, and equal in buffers and parameters later."""

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError, ReplicaError
from evenstep.internals import is_saved
from evenstep.parallel.group import Group
from evenstep.tensors import byte_sum, named_parameters

_OF_PARAMETERS = "a hook, a task or a memory fault changed it on one rank only. Go on from the last checkpoint."
_OF_BUFFERS = (
    "code outside of the forward (`after_update` of a hook or task?) changed it by one rank's micro-batches only. Sum "
    "over ranks there (`torch.distributed.all_reduce`), or register the buffer with `persistent=False`."
)


def synchronise(module: nn.Module, group: Group) -> None:
    """Give every rank rank 0's parameters and buffers."""
    for name, part in module.named_modules() if group.ranks > 1 else ():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ArgumentError(
                f"`{name}` has `max_norm`, whose forward writes to rows of this rank's samples only; build the layer "
                f"without `max_norm`, and scale all rows in `before_update`.",
                field="max_norm",
            )
        if getattr(part, "sparse", False) is True:
            raise ArgumentError(
                f"gradients of `{name}` are sparse, which several ranks can't sum; build it without `sparse=True`.",
                field="sparse",
            )
    with torch.no_grad():
        group.broadcast([*module.parameters(), *module.buffers()])


def compare_replicas(module: nn.Module, group: Group, update: int, *, replica_ranks: int = 1) -> None:
    """Compare the buffers that checkpoints hold after the first two updates, and parameters after each hundredth.

    Args:
        replica_ranks: how many neighbouring ranks share one replica; those in the same place of theirs are compared.
            Buffers are whole on each rank.
    """
    compared: dict[str, tuple[int, Tensor]] = {}
    if update <= 2 and group.ranks > 1:
        compared = {f"buffer `{name}`": (1, one) for name, one in _saved_buffers(module).items()}
    elif update % 100 == 0 and group.ranks > replica_ranks:
        compared = {f"parameter `{name}`": (replica_ranks, one) for name, one in named_parameters(module).items()}
    if not compared:
        return
    everybody = group.gather(torch.stack([byte_sum(tensor) for _, tensor in compared.values()]).tolist())
    for (what, (places, _)), *values in zip(compared.items(), *everybody, strict=True):
        others = [rank for rank, value in enumerate(values) if value != values[rank % places]]
        if others:
            raise ReplicaError(
                f"after update {update} rank {', '.join(map(str, others))} differs from rank {others[0] % places}, "
                f"first in {what}: {_OF_PARAMETERS if what.startswith('parameter') else _OF_BUFFERS}"
            )


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if is_saved(part, name)
    }
