"""How a stage's gradients become their sums over data-parallel ranks: six verbs, and a power that most have.

Every reduction is a plain SUM, since each loss is divided by the update's weight before its backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import nn

from evenstep.parallel.group import Group


class Reducer:
    """The verbs between an update and the data-parallel ranks of one stage.

    Attributes:
        collects: whether each micro-batch's gradients are taken out of `.grad` by `collect`.
    """

    collects: bool = False

    def __init__(self, module: nn.Module, group: Group) -> None:
        self.module = module
        self.group = group

    def wrap(self) -> nn.Module:
        """Make the module equal on all ranks and ready to train; gives what to call in its place.

        Parameters keep their names, but others may take their place in the module.
        """
        return self.module

    def begin(self) -> None:
        """The accumulation of an update begins, perhaps anew: forget what an earlier or failed one has left."""

    def arm(self) -> None:
        """The module's next backward is its last of this update: gradients may be reduced as they appear."""

    def collect(self, microbatch: int) -> None:
        """The backward of `microbatch` has just added its gradients to those of the module."""

    def reduce(self, num_microbatches: int) -> None:
        """Return when the module's gradients are summed over all ranks, or will be before they are read.

        Args:
            num_microbatches: of the update, over all ranks.
        """

    def after_update(self, update: int) -> None:
        """Called after `update` was committed; now and then replicas are compared."""


class ChoosesTrained(ABC):
    """The power to sum the gradients of some parameters only."""

    @abstractmethod
    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on these parameters' gradients are summed, and no others'; between updates, after `wrap`.

        Args:
            parameters: those that are trained, in the module's order; the same on all ranks.
        """
