"""One process: nothing is shared, so no verb does anything.

It is not a stand-in for a strategy to come: it is what a laptop and one GPU use.
"""

from typing import final

from torch import nn

from evenstep.parallel.reducer.reducer import Reducer
from evenstep.parallel.reducer.strategy import Strategy


@final
class Single(Strategy):
    """The strategy of a run on a single process.

    >>> Single().ranks
    1
    """

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return Reducer(module, self.group)
