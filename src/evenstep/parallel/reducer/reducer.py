"""How a stage's gradients become their sums over data-parallel ranks: six verbs, and powers that only some have.

Each stage of a rank has its own reducer. Every reduction is a plain SUM, because each loss is divided by the weight of
the whole update before its backward. The defaults do nothing, which is what one rank needs. It is not a wrapper around
the training loop, and it does not know who holds what of a tensor; that is the `ParameterLayout`'s.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn

from evenstep.parallel.group import Group

T = TypeVar("T")


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


class Compresses(ABC):
    """The power to send gradients in fewer bits than they have."""

    @abstractmethod
    def uncompressed(self) -> AbstractContextManager[str]:
        """Inside, gradients are summed in full, to see why a sum was not finite; gives what to say if it then is."""


class GathersPerPlan(ABC):
    """The power to hold parameters whole while a plan runs, and in shards otherwise."""

    @abstractmethod
    def unshard(self) -> None:
        """Gather the stage's parameters: no forward or backward of the plan then waits for other ranks."""

    @abstractmethod
    def reshard(self) -> None:
        """Keep what is this rank's only, and forget what passes have left behind."""


class GathersPerPass(ABC):
    """The power to hold parameters in shards that each pass gathers: all ranks run the same passes.

    They run micro-batches of one kind (of one task) at the same time, kinds in turn.
    """

    @abstractmethod
    def pad_passes(self, work: Sequence[T], run: Callable[[T], None], *, backward: bool, kind: str, last: bool) -> None:
        """Before an update's or an evaluation's passes: run dummy passes, until all ranks run the same number.

        Args:
            work: this rank's micro-batches, or what they are cut into.
            run: runs a micro-batch without a trace: no metrics, no changed buffers. What it adds to gradients is
                removed by the reducer.
            backward: whether passes come back.
            kind: of the micro-batches; only those of one kind go through the same parts of a model.
            last: whether no passes of another kind follow in this accumulation.
        """

    @abstractmethod
    def relearn(self) -> None:
        """After a failed try: forget the order in which passes gather, of which ranks may know different parts."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[None]:
        """Inside, this rank holds all parameters, and may call any part of the module as often as it likes.

        All ranks enter together, between passes; no rank waits for another inside.
        """

    @abstractmethod
    def gathering_nothing(self) -> AbstractContextManager[None]:
        """Inside, the module is called with values that stand in the place of its parameters, so none are gathered."""

    @abstractmethod
    def explained(self, error: Exception) -> Exception:
        """What an error of torch's in a pass means; `error` itself if nothing more is known."""
