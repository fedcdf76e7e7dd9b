"""One process: nothing is shared, so no verb does anything.

It is not a stand-in for a strategy to come: it is what a laptop and one GPU use.
"""

from collections.abc import Callable
from typing import Any, final

from evenstep.parallel.strategy import Strategy


@final
class Single(Strategy):
    """The strategy of one rank.

    >>> Single().ranks
    1
    """

    cuts_alone = True

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None: ...
