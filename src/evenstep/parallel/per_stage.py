"""One strategy for several stages: each stage of this rank gets one of its own.

What a strategy holds (buckets, partial sums) is of the one module that it wraps, so every stage works with a copy. The
copies share the group, and their reductions come in the same order on all its ranks because the runner sees to it.
It does not sum over stages: those are other parameters, or tied ones (`pipeline.ties`).
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, final

from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel.ddp import Ddp
from evenstep.parallel.ordered import Ordered
from evenstep.parallel.single import Single
from evenstep.parallel.strategy import Strategy


@final
class PerStage(Strategy):
    """Strategies of the stages of one rank.

    Args:
        like: the strategy to copy, which has wrapped nothing yet.

    Raises:
        ArgumentError: a strategy that can't be copied per stage.

    >>> PerStage(Single()).ranks
    1
    """

    def __init__(self, like: Strategy) -> None:
        if not isinstance(like, Single | Ddp | Ordered):
            raise ArgumentError(
                f"a model in stages must be shared by Single, Ddp or Ordered, but the strategy is "
                f"{type(like).__name__}, which shards what a stage holds; take one of those, or train without stages."
            )
        super().__init__(like.group)
        self._like = like
        self._of: dict[int, Strategy] = {}
        self.collects = type(like).collect is not Strategy.collect

    def wrap(self, module: nn.Module) -> nn.Module:
        own = copy(self._like)
        self._of[id(module)] = own
        wrapped = own.wrap(module)
        self._of[id(wrapped)] = own
        return wrapped

    def arm(self, module: Callable[..., Any]) -> None:
        self._of[id(module)].arm(module)

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        self._of[id(module)].collect(module, microbatch)

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        self._of[id(module)].reduce(module, num_microbatches)

    def after_update(self, update: int) -> None:
        for own in dict.fromkeys(self._of.values()):
            own.after_update(update)

    @contextmanager
    def uncompressed(self) -> Generator[str]:
        with ExitStack() as stack:
            advice = [stack.enter_context(own.uncompressed()) for own in dict.fromkeys(self._of.values())]
            yield next(iter(advice), "")
