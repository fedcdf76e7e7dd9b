"""One process trains one model: gradients are summed over nobody.

Also for ranks that train a model each under a hook that averages them (`contrib.local_sgd`).
"""

from typing import final

from torch import nn

from evenstep.parallel.group import Group
from evenstep.parallel.reducer.reducer import Reducer
from evenstep.parallel.reducer.strategy import Strategy


@final
class Single(Strategy):
    """Each rank trains a model of its own.

    Args:
        ranks: the ranks of the run, which need a hook that averages their models; none for a single process.

    >>> Single().ranks
    1
    """

    def __init__(self, ranks: Group | None = None) -> None:
        super().__init__()
        if ranks is not None:
            self.data_group = ranks

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return Reducer(module, self.group)
