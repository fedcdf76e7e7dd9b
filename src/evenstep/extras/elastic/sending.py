"""A tree of tensors that one process has, sent to all others."""

from typing import Any

import torch

from evenstep.checkpoint import pack, unpack
from evenstep.parallel import Group


def shared(group: Group, tree: Any, source: int) -> Any:
    """The tree of `source`, on every rank: its tensors go one by one.

    >>> shared(Group(), {"a": [torch.ones(2), "b"]}, 0)
    {'a': [tensor([1., 1.]), 'b']}
    """
    tensors, skeleton = pack(tree, "state") if group.rank == source else ({}, None)
    forms = [(name, one.shape, one.dtype) for name, one in tensors.items()]
    skeleton, forms = group.gather((skeleton, forms))[source]
    for name, shape, dtype in forms:
        whole = tensors[name] if group.rank == source else torch.empty(shape, dtype=dtype)
        flat = whole.contiguous().reshape(-1)
        if flat.numel():
            group.broadcast([flat.view(torch.uint8)], source)
        tensors[name] = flat.view(shape)
    return unpack(skeleton, tensors, "state")
