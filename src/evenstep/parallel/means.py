"""The mean of tensors over ranks, on its way while the ranks go on.

A mean is a sum divided by the number of ranks, so it has one definition whatever the order of its additions; in a fixed
tree over the ranks it has the same bits however they are connected. It does not know what it is a mean of.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from evenstep.parallel.group import Group
from evenstep.parallel.tree import TreeSum


@final
class MeanOverRanks:
    """The mean of some parameters over the ranks: to be sent, on its way, or come.

    Args:
        values: of this rank, by name.
        may_break: whether it may have to be sent again, so that this rank keeps what it has sent.
    """

    def __init__(self, values: Mapping[str, Tensor], group: Group, *, is_ordered: bool, may_break: bool) -> None:
        self._group, self._is_ordered = group, is_ordered
        dtypes = dict.fromkeys(one.dtype for one in values.values())
        self._alike = [{name: one.shape for name, one in values.items() if one.dtype == dtype} for dtype in dtypes]
        self._own = [torch.cat([values[name].reshape(-1) for name in some]) for some in self._alike]
        self._may_break = may_break
        self._come: dict[str, Tensor] | None = None
        self._is_broken = True  # so far nothing is sent

    @classmethod
    def of(cls, values: dict[str, Tensor]) -> "MeanOverRanks":
        """One that has come."""
        made = cls.__new__(cls)
        made._come = values
        return made

    def send(self) -> None:
        """Begin to sum over the ranks that there are now."""
        self._count = self._group.ranks
        self._sent = [one.clone() for one in self._own] if self._may_break else self._own
        if self._is_ordered:
            tree = TreeSum(self._sent)
            tree.add(self._group.rank, [*self._sent])
            total = tree.total(self._group, num_microbatches=self._group.ranks)
            self._sent, self._waits = [one for one in total if one is not None], []
        else:
            self._waits = [self._group.sum(one) for one in self._sent]
        self._is_broken = False

    @property
    def has_come(self) -> bool:
        """Whether this rank has it: a sum in a tree over the ranks comes as it is sent."""
        return self._come is not None or not (self._is_broken or self._waits)

    def take(self, group: Group, rank: int) -> None:
        """Let it be what has come to one of the ranks, which all call it together."""
        if self.has_come:
            come = self.values()
        else:
            pieces = zip(self._own, self._alike, strict=True)
            come = {name: flat.new_empty(size) for flat, some in pieces for name, size in some.items()}
        group.broadcast([come[name] for name in sorted(come)], rank)
        self._come, self._own, self._sent = come, [], []

    def break_off(self) -> None:
        """What has not come must be sent again."""
        self._is_broken = self._come is None

    def values(self) -> dict[str, Tensor]:
        """The mean by name; all ranks call it together."""
        if self._come is None:
            if self._is_broken:
                self.send()
            for wait in self._waits:
                wait()
            self._come = {}
            for flat, some in zip(self._sent, self._alike, strict=True):
                pieces = flat.div_(self._count).split([shape.numel() for shape in some.values()])
                self._come |= {name: one.view(some[name]) for name, one in zip(some, pieces, strict=True)}
            self._own = self._sent = []
        return self._come
