"""Replicas whose gradients are summed in one fixed order: the same bits for every layout with the same micro-batches.

It costs log₂(n) + 1 sets of gradients and overlaps nothing; `Ddp` is the fast way, equal up to rounding.
"""

from collections.abc import Sequence
from typing import final

from torch import nn

from evenstep.parallel.group import Group
from evenstep.parallel.reducer.reducer import ChoosesTrained, Reducer
from evenstep.parallel.reducer.strategy import Strategy
from evenstep.parallel.replicas import compare_replicas, synchronise
from evenstep.parallel.tree import TreeSum


@final
class Ordered(Strategy):
    """As `Ddp`, with gradients summed in the order of the micro-batches' numbers: the same bits on any number of ranks.

    Args:
        group: the ranks, such as `Processes(device)`; by default one, which sums in the same order.

    >>> Ordered().ranks
    1
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__(group)

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return OrderedReducer(module, self.group)


@final
class OrderedReducer(Reducer, ChoosesTrained):
    """Sums each micro-batch's gradients in a fixed binary tree."""

    collects = True

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__(module, group)
        self._parameters: list[nn.Parameter] = []
        self._tree = TreeSum([])

    def wrap(self) -> nn.Module:
        synchronise(self.module, self.group)
        self.share([parameter for parameter in self.module.parameters() if parameter.requires_grad])
        return self.module

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._tree = TreeSum(self._parameters)

    def begin(self) -> None:
        self._tree = TreeSum(self._parameters)

    def collect(self, microbatch: int) -> None:
        self._tree.add(microbatch, [parameter.grad for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, num_microbatches: int) -> None:
        total = self._tree.total(self.group, num_microbatches=num_microbatches)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient
        self._tree = TreeSum(self._parameters)

    def after_update(self, update: int) -> None:
        compare_replicas(self.module, self.group, update)
