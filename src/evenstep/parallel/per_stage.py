"""One strategy for several stages: each stage of this rank gets one of its own.

What a strategy holds (buckets, partial sums, shards) is of the one module that it wraps, so every stage works with a
copy. The copies share the group, and their reductions come in the same order on all its ranks because the runner sees
to it. It does not sum over stages: those are other parameters, or tied ones (`pipeline.ties`).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, final

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.parallel.buffers import Before
from evenstep.parallel.ddp import Ddp
from evenstep.parallel.ordered import Ordered
from evenstep.parallel.sharded import Sharded
from evenstep.parallel.sharded_stage import in_stages
from evenstep.parallel.single import Single
from evenstep.parallel.strategy import Strategy
from evenstep.parallel.zero1 import Zero1


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

    cuts_alone = True

    def __init__(self, like: Strategy) -> None:
        if not isinstance(like, Single | Ddp | Ordered | Sharded):
            raise ArgumentError(
                f"a model in stages must be shared by Single, Ddp, Ordered, Fsdp, OrderedFsdp or Zero1, but the "
                f"strategy is {type(like).__name__}; take one of those, or train without stages."
            )
        super().__init__(like.group)
        self._like = in_stages(like) if isinstance(like, Sharded) else like
        self._of: dict[int, Strategy] = {}
        self._modules: list[tuple[Strategy, nn.Module]] = []
        self.collects = like.collects
        self.divides = like.divides
        self.gathers_per_plan = self._like.gathers_per_plan

    @property
    def _all(self) -> list[Strategy]:
        return list(dict.fromkeys(self._of.values()))

    def wrap(self, module: nn.Module) -> nn.Module:
        own = copy(self._like)
        self._of[id(module)] = own
        wrapped = own.wrap(module)
        self._modules.append((own, wrapped))
        self._of[id(wrapped)] = own
        return wrapped

    @property
    def part_held(self) -> tuple[int, int]:
        return self._like.part_held

    def begin(self, module: Callable[..., Any]) -> None:
        self._of[id(module)].begin(module)

    def spoil(self, module: Callable[..., Any], num_microbatches: int, error: Exception) -> None:
        self._of[id(module)].spoil(module, num_microbatches, error)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        for own in self._all:
            own.adopt(optimizer)

    def share(self, parameters: Sequence[nn.Parameter]) -> None:
        trained = {id(parameter) for parameter in parameters}
        for own, module in self._modules:
            own.share([parameter for parameter in module.parameters() if id(parameter) in trained])

    def gather(self, module: Callable[..., Any]) -> None:
        self._of[id(module)].gather(module)

    def release(self, module: Callable[..., Any]) -> None:
        self._of[id(module)].release(module)

    def arm(self, module: Callable[..., Any]) -> None:
        self._of[id(module)].arm(module)

    def collect(self, module: Callable[..., Any], microbatch: int) -> None:
        self._of[id(module)].collect(module, microbatch)

    def reduce(self, module: Callable[..., Any], num_microbatches: int) -> None:
        self._of[id(module)].reduce(module, num_microbatches)

    def each_norm(self, gradients: list[Tensor], norms: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return self._like.each_norm(gradients, norms)

    def share_buffers(self, before: Before) -> None:
        for own in self._all:
            own.share_buffers(before)

    def after_update(self, update: int) -> None:
        for own in self._all:
            own.after_update(update)

    def abandon(self) -> None:
        for own in self._all:
            own.abandon()

    def whole(self, tensor: Tensor) -> Tensor:
        return self._like.whole(tensor)

    def part(self, live: Tensor, whole: Tensor) -> Tensor:
        return self._like.part(live, whole)

    @contextmanager
    def uncompressed(self) -> Generator[str]:
        with ExitStack() as stack:
            advice = [stack.enter_context(own.uncompressed()) for own in self._all]
            yield next(iter(advice), "")


def of_stages(strategy: Strategy) -> Strategy:
    """What `strategy` is for a model in stages.

    Raises:
        ArgumentError: it is not for stages.

    >>> type(of_stages(Single())).__name__, type(of_stages(Zero1(Single()))).__name__
    ('PerStage', 'Zero1')
    """
    return Zero1(PerStage(strategy.replicas)) if isinstance(strategy, Zero1) else PerStage(strategy)
