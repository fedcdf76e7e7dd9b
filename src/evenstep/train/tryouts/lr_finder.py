"""Finds a learning rate by updates at rising rates, after which the state is restored.

The updates are the run's own, of its next global batches, with all that belongs to them (clipping, precision, ranks);
only the rates are others. Then the state of before is put back. It proposes; it sets nothing.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast, final

from torch import Tensor

from evenstep.arguments import require_number, require_whole
from evenstep.data import ReadOptions
from evenstep.data.seeding import undisturbed
from evenstep.errors import ArgumentError
from evenstep.parallel import mapped
from evenstep.pipeline import PipelineModel
from evenstep.train.tasks.now import TaskHook
from evenstep.train.update.outcome import Committed

if TYPE_CHECKING:
    from evenstep.train.loop import Loop

_SMOOTHING = 0.9  # share of the average of the losses before that stays at each update


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLr:
    """Tried rates, their losses, and a suggestion.

    Args:
        rates: of the optimizer's first group, one for each update, rising.
        losses: of those updates, each before its own step.
        suggestion: a rate at which the smoothed loss fell fastest; None where it never fell, or by no more on the whole
            than a loss usually differs from the one before.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float | None

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The losses' exponential moving average, without the weight of its beginning.

        s_k = Σ_{j≤k} β^{k-j} l_j / Σ_{j≤k} β^{k-j}, β = 0.9
        """
        return _smoothed(self.losses)


def search(loop: "Loop", *, lowest: float, highest: float, updates: int, divergence: float) -> FoundLr:
    """The same for the loop of a trainer that does not train."""
    check_range(lowest=lowest, highest=highest, updates=updates, divergence=divergence)
    _check(loop)
    engine = loop.engine
    begin, ratio = engine.progress.update, highest / lowest

    def rate_of(update: int) -> float:
        return lowest * ratio ** ((update - begin - 1) / (updates - 1))

    state = mapped(loop.checkpointer.state.state_dict(whole=True), _copy)  # which further updates do not change
    losses: list[float] = []
    engine.group.go_on()
    engine.prepare()
    try:
        with undisturbed(engine.parts.context.device), engine.bus.silent(but=TaskHook):
            with engine.core.learning_rates.override(rate_of):
                losses = [*_losses(loop, updates, divergence)]
            loop.checkpointer.load(state)
    finally:
        loop.feed.data.close()
    if len(losses) < 3:
        raise ArgumentError(
            f"the learning rate is found from three updates at least, but only {len(losses)} could be made before the "
            f"loss was above {divergence:g} times its smallest or the data ended; begin at a lower rate, or try "
            f"more updates."
        )
    rates = tuple(rate_of(begin + 1 + number) for number in range(len(losses)))
    return FoundLr(rates=rates, losses=tuple(losses), suggestion=_steepest(rates, losses))


def _losses(loop: "Loop", updates: int, divergence: float) -> Iterator[float]:
    engine, reducers = loop.engine, loop.engine.reducers
    batches = loop.feed.data.batches(
        ReadOptions(start=engine.progress.position, seed=engine.seed, rank=reducers.rank, ranks=reducers.ranks)
    )
    losses: list[float] = []
    with closing(cast("Any", batches)):
        for batch in batches:
            outcome = engine.update(batch)
            loss = outcome.metrics().get("loss", math.nan) if isinstance(outcome, Committed) else math.nan
            if not math.isfinite(loss):
                return
            losses.append(loss)
            yield loss
            smoothed = _smoothed(losses)
            if smoothed[-1] > divergence * min(smoothed) or len(losses) == updates:
                return


def _smoothed(losses: Sequence[float]) -> tuple[float, ...]:
    total, weight, smoothed = 0.0, 0.0, list[float]()
    for loss in losses:
        total, weight = _SMOOTHING * total + loss, _SMOOTHING * weight + 1
        smoothed.append(total / weight)
    return tuple(smoothed)


def _steepest(rates: tuple[float, ...], losses: Sequence[float]) -> float | None:
    """The rate in the midst of that tenth of the updates over which the smoothed loss falls most.

    The first tenth is left out, in which few losses are averaged, and what comes after the smallest. A fall that is,
    on the whole, not above the median of |l_k - l_{k-1}| is chance, of which nothing follows.

    >>> _steepest((1.0, 10.0, 100.0, 1000.0, 10000.0), (3.0, 2.9, 1.0, 0.9, 5.0))
    10.0
    >>> _steepest((1.0, 10.0, 100.0, 1000.0, 10000.0), (3.0, 2.9, 3.1, 2.8, 5.0))
    """
    from statistics import median  # which takes 2 ms of everybody's import

    smoothed = _smoothed(losses)
    usual = median(abs(one - before) for before, one in pairwise(losses))
    width = max(len(smoothed) // 10, 1)
    begin = len(smoothed) // 10
    lowest = begin + smoothed[begin:].index(min(smoothed[begin:]))
    if smoothed[begin] - smoothed[lowest] <= usual:
        return None
    falls = {number: smoothed[number] - smoothed[number + width] for number in range(begin, lowest - width + 1)}
    steepest = max(falls, key=falls.__getitem__, default=None)
    return None if steepest is None or falls[steepest] <= 0 else rates[steepest + width // 2]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def check_range(*, lowest: float, highest: float, updates: int, divergence: float = 4.0) -> None:
    """Raise ArgumentError for numbers that `find_lr` can't try rates by."""
    for name, value in (("lowest", lowest), ("highest", highest), ("divergence", divergence)):
        require_number(name, value)
    if not 0 < lowest < math.inf:
        raise ArgumentError(
            f"`lowest` must be a learning rate above 0, but is {lowest}; 1e-7 is usual.", field="lowest"
        )
    if not lowest < highest < math.inf:
        raise ArgumentError(
            f"`highest` must be a learning rate above the `lowest` of {lowest}, but is {highest} (1.0 where it is not "
            f"given); raise it, or give a lower `lowest`.",
            field="highest",
        )
    require_whole("updates", updates, at_least=3, advice="100 is usual")
    if not 1 < divergence < math.inf:
        raise ArgumentError(f"`divergence` must be above 1, but is {divergence}; 4 is usual.", field="divergence")


def _check(loop: "Loop") -> None:
    if isinstance(loop.engine.model, PipelineModel):
        raise ArgumentError(
            "`find_lr` puts back a state that each rank can hold whole, but the model is in stages; try it without "
            "stages, on fewer layers if need be."
        )
    if loop.engine.group.can_change:
        raise ArgumentError("`find_lr` is for ranks that stay, but those of this run come and go; try it without.")
    if (state := loop.feed.data.state) is not None and state.positions == "epochs":
        raise ArgumentError(
            "`find_lr` reads batches that the run then reads again, but this stream can't say where it is; give it "
            "`state_dict` and `load_state_dict`, or try a dataset with a length.",
            field="find_lr",
        )
