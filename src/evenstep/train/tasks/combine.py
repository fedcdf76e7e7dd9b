"""What becomes of the tasks' separate gradients: the seam.

Every method here gives a gradient Σ_t α_t · g_t whose α_t follow from the inner products of the g_t alone, so it is a
pure function of a T × T matrix and never sees a gradient. The g_t are whole: summed over all micro-batches and ranks,
divided by their weights and the loss scale, times their λ_t. How they are made and put together is in
`contrib.multitask`, where the methods are as well, loaded when a run asks for one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWeights:
    """What the tasks' gradients are multiplied by before they are summed.

    Args:
        shared: α_t for parameters that several tasks have a gradient of.
        own: for those that only one task has, such as its head.
    """

    shared: list[float]
    own: list[float]


class Combine(ABC):
    """From inner products to weights of tasks.

    Attributes:
        needs_products: whether it looks at inner products and losses at all.
    """

    needs_products: bool = True

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        """Get ready for the tasks of a run; gives the module whose buffers must be saved, if there is one."""
        return None

    def looks_at(self, parameter: str) -> bool:
        """Whether the inner products are over this parameter, among those that several tasks share; over all here."""
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

    >>> import torch
    >>> Separate()(torch.eye(2).double(), [1.0, 1.0], tasks=["a", "b"], seed=1, update=1).shared
    [1.0, 1.0]
    """

    needs_products = False

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        return TaskWeights(shared=[1.0] * len(tasks), own=[1.0] * len(tasks))
