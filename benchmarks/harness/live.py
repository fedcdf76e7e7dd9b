"""How many bytes of tensors live, counted by their storages: the same for every contender, and in every run.

Seen is what operators of the thread that has entered the meter give, in Python or in autograd, from when they have
given it until nothing refers to it. What a kernel takes and frees within one operator is not seen, nor is what was
made before, unless it is told.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        uncounted: tensors that count nowhere, such as parameters.

    `now` holds the bytes that live, `peak` the most that did.

    >>> with Live(uncounted=[]) as live:
    ...     one = torch.ones(8)
    ...     two = one + one[:4].repeat(2)
    ...     del one
    >>> live.now, live.peak
    (32, 96)
    """

    def __init__(self, uncounted: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: dict[int, object] = {id(one.untyped_storage()): one.untyped_storage() for one in uncounted}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return given

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def gone(_: object) -> None:
            del self._seen[key]
            self.now -= num_bytes

        self._seen[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
