"""Replicas whose gradients are summed in one fixed order: the same bits for every layout with the same micro-batches.

Each micro-batch's gradients are taken out of `.grad` as they appear and summed in the tree of `parallel.tree`, within
this rank and then across ranks. It costs log₂(n) + 1 sets of gradients and overlaps nothing; `Ddp` is the fast way,
equal to this one up to rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn

from evenstep.parallel.buffers import Before
from evenstep.parallel.group import Group
from evenstep.parallel.replicas import Replicas
from evenstep.parallel.strategy import Strategy
from evenstep.parallel.tree import Tree


@final
class Ordered(Strategy):
    """Replicas whose gradients are summed in the order of their micro-batches' numbers.

    Args:
        group: the ranks; one by default, where the order is the same.

    >>> Ordered().ranks
    1
    """

    collects = True
    cuts_alone = True

    def __init__(self, group: Group | None = None) -> None:
        super().__init__(group)
        self._replicas = Replicas(nn.Module(), self.group)
        self._parameters: list[nn.Parameter] = []
        self._tree = Tree([])
        self._reducing = False

    @property
    def retries_alone(self) -> bool:
        return not self._reducing

    def wrap(self, module: nn.Module) -> nn.Module:
        self._replicas = Replicas(module, self.group)
        self.share([parameter for parameter in module.parameters() if parameter.requires_grad])
        return module

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._tree = Tree(self._parameters)

    def begin(self, module: Callable[..., Any]) -> None:
        self._tree = Tree(self._parameters)
        self._reducing = False

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        self._tree.add(microbatch, [parameter.grad for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        self._reducing = True
        total = self._tree.total(self.group, num_microbatches=num_microbatches)
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient
        self._tree = Tree(self._parameters)
        self._reducing = False

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        if self._reducing and self.ranks > 1:
            raise error
        self._tree.spoil(self.group)

    def abandon(self) -> None:
        self._tree = Tree(self._parameters)
        self._replicas.buffers.look_anew()

    def share_buffers(self, before: Before) -> None:
        self._replicas.buffers.share(before)

    def after_update(self, update: int) -> None:
        self._replicas.after_update(update)
