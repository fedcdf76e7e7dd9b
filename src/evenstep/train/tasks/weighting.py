"""Seams for the weights of tasks: coefficients λ_t of their losses, and methods that combine their gradients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, final

from torch import Tensor, nn

from evenstep.arguments import advice
from evenstep.errors import ArgumentError


class Coefficients:
    """The λ_t of the tasks: one number for each, finite and above 0; 1 where none is given.

    Attributes:
        are_learned: True if `weighted` adds parameters to the loss; `value` then gives 1.

    >>> Coefficients({"box": 0.5}).value("box", 1), Coefficients().value("class", 1)
    (0.5, 1.0)
    """

    are_learned: bool = False
    _values: Mapping[str, float] = MappingProxyType({})

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._values = dict(values or {})

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        """Get ready for the tasks of a run; gives the module whose parameters are learned, if there is one."""
        check_tasks(self._values, tasks)
        return None

    def check(self, updates: int | None) -> None:
        """Raise ArgumentError unless the coefficients fit a run of so many updates."""

    def value(self, task: str, update: int) -> float:
        """The number that the gradient of the task's loss is multiplied by in `update`."""
        return float(self._values.get(task, 1.0))

    def weighted(self, task: str, loss: Tensor, share: float | Tensor) -> Tensor:
        """The summed loss of a micro-batch of weight `share` with its learned coefficient."""
        return loss


def check_tasks(given: Mapping[str, object], tasks: Sequence[str]) -> None:
    """Raise ArgumentError for a coefficient of no task of the run."""
    for name in given:
        if name not in tasks:
            raise ArgumentError(
                f"`coefficients` names task `{name}`, which the run has not; {advice(name, tasks)}",
                field="coefficients",
            )


class TaskWeights(NamedTuple):
    """Factors α_t of the tasks' gradients in their sum.

    Args:
        shared: for parameters that several tasks have a gradient of.
        own: for parameters that only one task has a gradient of, such as its head.
    """

    shared: list[float]
    own: list[float]


class Combine(ABC):
    """A method that combines the tasks' gradients g_t into Σ_t α_t · g_t, from their inner products alone.

    The g_t are whole: summed over all micro-batches and ranks, divided by their weights and the loss scale, times their
    λ_t. Methods are in `contrib.multitask`, which also computes the separate gradients.
    """

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        """Get ready for the tasks of a run; gives the module whose buffers must be saved, if there is one."""
        return None

    def looks_at(self, parameter: str) -> bool:
        """True if inner products are over this parameter, among the shared ones; over all by default."""
        return True

    @abstractmethod
    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        """The weights of an update.

        Args:
            products: `[T, T]`, ⟨g_s, g_t⟩ in float64 on the CPU, all finite.
            losses: `[T]`, each task's loss over the update, divided as its gradient is, without λ_t.
            tasks: the names of the T tasks that have work, in the order of the run's.
        """


@final
class Separate(Combine):
    """The sum of the separate gradients: the same update as without a method.

    Used where a task with a late weight stands beside others, since its gradient is divided before it is added.
    """

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        return TaskWeights([1.0] * len(tasks), [1.0] * len(tasks))
