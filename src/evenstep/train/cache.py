"""Gives memory that the device's allocator keeps for later back to the device, every so many updates.

It is what another process on the same device, or an allocator in pieces, may need; by itself it makes updates slower.
It frees nothing that is in use.
"""

from collections.abc import Callable

import torch

from evenstep.errors import ArgumentError


def build_emptying(every_updates: int | None, device: torch.device) -> Callable[[int], None] | None:
    """What is called with the number of each update that has ended; None where there is nothing to do.

    Args:
        every_updates: how often it empties the cache; None for never.

    Raises:
        ArgumentError: the device's allocator keeps nothing.

    >>> build_emptying(None, torch.device("cpu"))
    """
    if every_updates is None:
        return None
    if device.type == "cpu":
        raise ArgumentError(
            f"`memory.empty_cache_every_updates` is {every_updates}, but the run is on a CPU, where freed memory is "
            f"not kept for later; leave it out, or compute on an accelerator (`device`)."
        )

    def empty(update: int) -> None:
        if update % every_updates == 0:
            torch.accelerator.empty_cache()

    return empty
