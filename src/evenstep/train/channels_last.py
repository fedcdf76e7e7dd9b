"""Batches of images in channels-last order, for models that are too.

Tensors of four dims are reordered, containers are rebuilt around them, and all else stays. It converts no model.
"""

import torch
from torch import Tensor

from evenstep.internals import pytree


def channels_last(batch: object) -> object:
    """The same batch with every 4-dim floating-point tensor `[N, C, H, W]` in channels-last order.

    >>> images = channels_last({"images": torch.ones(2, 3, 4, 4), "labels": [1, 2]})["images"]
    >>> images.is_contiguous(memory_format=torch.channels_last)
    True
    """
    return pytree.tree_map_only(Tensor, _reordered, batch)


def _reordered(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
