"""How gradients and parameters are shared between data-parallel ranks.

A strategy has few verbs, and every reduction is a plain SUM, because each loss is divided by the weight of the whole
update before its backward. The defaults here do nothing, which is what one rank needs. It is not a wrapper around
the training loop: the update calls the verbs, and asks nothing about which strategy it has.
"""

from abc import ABC
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

Summable = TypeVar("Summable", float, Tensor)


class Strategy(ABC):
    """The verbs between an update and its data-parallel ranks.

    Attributes:
        rank: this process's number among the data-parallel ranks.
        ranks: how many there are.
    """

    rank: int = 0
    ranks: int = 1

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to call in place of `module`; its parameters keep their names."""
        return module

    def sum(self, value: Summable) -> Summable:
        """The sum of `value` over all ranks: a weight, or a tensor of any shape."""
        return value

    def arm(self, module: Callable[..., Any]) -> None:
        """The next backward of `module` is its last of this update: gradients may be reduced as they appear."""

    def reduce(self, module: Callable[..., Any]) -> None:
        """Return when the gradients of `module` are summed over all ranks, or will be before they are read."""

    def after_update(self, update: int) -> None:
        """Called after `update` was committed: for strategies that share parameters instead of gradients."""
