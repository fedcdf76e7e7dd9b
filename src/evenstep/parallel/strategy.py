"""How gradients and parameters are shared between data-parallel ranks.

A strategy has few verbs, and every reduction is a plain SUM, because each loss is divided by the weight of the whole
update before its backward. The defaults here do nothing, which is what one rank needs. It is not a wrapper around
the training loop: the update calls the verbs, and asks nothing about which strategy it has.
"""

from abc import ABC
from collections.abc import Callable
from typing import Any

from torch import nn

from evenstep.parallel.group import Group


class Spoiled(Exception):
    """A peer could not give its gradients to a reduction: the sum must not be used, and all begin the update again."""


class Strategy(ABC):
    """The verbs between an update and its data-parallel ranks.

    Args:
        group: the ranks, through which they also agree; a group of one by default.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Group()

    @property
    def rank(self) -> int:
        """This process's number among the data-parallel ranks."""
        return self.group.rank

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks there are."""
        return self.group.ranks

    @property
    def retries_alone(self) -> bool:
        """Whether this rank may begin its accumulation anew without its peers: nothing has been given to them yet."""
        return True

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to call in place of `module`; its parameters keep their names."""
        return module

    def begin(self, module: Callable[..., Any]) -> None:
        """The accumulation of an update begins, perhaps anew after a failed try: forget what was collected."""

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        """Take part in the reduction that the peers are in, so that they raise `Spoiled` and begin anew as well.

        Called, with `.grad` empty, when this rank has failed where it does not retry alone.

        Args:
            module: whose.
            num_microbatches: of the update, over all ranks.
            error: what to raise where the peers can't be told, as when they are in the midst of other collectives.
        """
        raise error

    def arm(self, module: Callable[..., Any]) -> None:
        """The next backward of `module` is its last of this update: gradients may be reduced as they appear."""

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        """The backward of `microbatch` has just added its gradients to those of `module`."""

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        """Return when the gradients of `module` are summed over all ranks, or will be before they are read.

        Args:
            module: whose.
            num_microbatches: of the update, over all ranks.

        Raises:
            Spoiled: a peer has failed; nothing of the sum may be used.
        """

    def after_update(self, update: int) -> None:
        """Called after `update` was committed: for strategies that share parameters instead of gradients."""
