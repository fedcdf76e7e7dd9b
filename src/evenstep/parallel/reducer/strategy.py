"""How gradients and parameters are shared between data-parallel ranks, as users say it.

A strategy is a description, from which a `Reducer` per stage and a `ParameterLayout` are made.
"""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import nn

from evenstep.parallel.group import Group
from evenstep.parallel.layout import ParameterLayout
from evenstep.parallel.reducer.reducer import Reducer


class Strategy(ABC):
    """The description of how ranks share a model.

    Args:
        group: the data-parallel ranks; a group of one by default.
        layout: who holds what of a tensor; by default every rank holds all.

    Attributes:
        data_group: the ranks that the data are dealt to and that save together; those of `group`, but for `Single`.
        gather_dtype: the number format in which parameters are gathered and used; None for their own.
    """

    gather_dtype: torch.dtype | None = None

    def __init__(self, group: Group | None = None, layout: ParameterLayout | None = None) -> None:
        self.group = group or Group()
        self.data_group = self.group
        self.layout = layout or ParameterLayout(self.group)

    @property
    def rank(self) -> int:
        """This process's number among the data-parallel ranks."""
        return self.group.rank

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks there are."""
        return self.group.ranks

    @property
    def settings(self) -> dict[str, Any]:
        """What updates depend on beside gradients that are summed, as plain values by their names in a run file."""
        return {}

    def gathering(self, dtype: torch.dtype) -> Self:
        """This strategy for a model that computes in `dtype`: how it gathers parameters, where it does.

        Raises:
            ArgumentError: it was told to gather them in another format.
        """
        return self

    @abstractmethod
    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        """What sums the gradients of a stage.

        Args:
            module: the stage's; its device and parameters are final.
            per_plan: whether parameters are whole while a plan runs, instead of being gathered by each pass.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ArgumentError for an optimizer that can't step what this rank holds; it is as the user has built it."""
