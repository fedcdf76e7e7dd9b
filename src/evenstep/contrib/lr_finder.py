"""Finds a learning rate by updates at rising rates, after which the state is restored."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast, final

from evenstep.arguments import require_whole
from evenstep.data import ReadOptions
from evenstep.data.seeding import undisturbed
from evenstep.errors import ArgumentError
from evenstep.parallel import mapped
from evenstep.pipeline import PipelineModel
from evenstep.train.tasks.tasks import TaskHook
from evenstep.train.trainer import Trainer, idle_loop
from evenstep.train.update.outcome import Committed

if TYPE_CHECKING:
    from evenstep.train.loop import Loop


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLr:
    """Rates of the first group, losses of their updates, and a suggested rate; None if the loss falls by noise only."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float | None

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Bias-corrected moving average of the losses: s_k = Σ_{j≤k} β^{k-j} l_j / Σ_{j≤k} β^{k-j}, β = 0.9."""
        return _smoothed(self.losses)


def find_lr(
    trainer: Trainer, *, lowest: float = 1e-7, highest: float = 1.0, updates: int = 100, divergence: float = 4.0
) -> FoundLr:
    """Try learning rates from `lowest` to `highest`, and restore the state; all ranks call it together.

    Update k of n has the rate lowest · (highest / lowest)^((k - 1) / (n - 1)) in the optimizer's first group, and the
    others in proportion. It stops when the smoothed loss is above `divergence` times the smallest so far. Hooks and
    writers are not called. A second copy of the state is in memory.

    Raises:
        ArgumentError: a model in stages, data that can't be read again, or fewer than three updates before the loss
            diverges.

    Reference: Smith, "Cyclical learning rates for training neural networks", WACV 2017, §3.3.
    """
    if not 0 < lowest < highest:
        raise ArgumentError(f"`highest` must be above `lowest`, but they are {highest} and {lowest}.", field="highest")
    require_whole("updates", updates, at_least=3)
    loop = idle_loop(trainer, "find_lr")
    if isinstance(loop.engine.model, PipelineModel) or loop.engine.group.can_change:
        raise ArgumentError("`find_lr` needs a model without stages, on ranks that stay.", field="find_lr")
    if loop.feed.data.positions == "epochs":  # the run then reads other batches
        raise ArgumentError(
            "`find_lr` needs data that can be read again; give the stream `state_dict` and `load_state_dict`.",
            field="find_lr",
        )
    engine, first = loop.engine, loop.engine.progress.update + 1
    rates = [lowest * (highest / lowest) ** (number / (updates - 1)) for number in range(updates)]
    state = mapped(loop.checkpointer.state.state_dict(whole=True), lambda one: one.detach().clone())
    engine.group.go_on()
    engine.parts.prepare()
    try:
        with undisturbed(engine.parts.context.device), engine.bus.silent(but=TaskHook):
            with engine.parts.core.learning_rates.override(lambda update: rates[update - first]):
                losses = [*_losses(loop, updates, divergence)]
            loop.checkpointer.load(state)
    finally:
        loop.feed.data.close()
    if len(losses) < 3:
        raise ArgumentError(f"only {len(losses)} updates were made before the loss diverged; begin at a lower rate.")
    tried = tuple(rates[: len(losses)])
    return FoundLr(rates=tried, losses=tuple(losses), suggestion=_steepest(tried, losses))


def _losses(loop: "Loop", updates: int, divergence: float) -> Iterator[float]:
    engine, reducers = loop.engine, loop.engine.reducers
    options = ReadOptions(
        start=engine.progress.position,
        seed=engine.parts.context.seed,
        rank=reducers.group.rank,
        ranks=reducers.group.ranks,
        blocks=reducers.blocks,
    )
    losses: list[float] = []
    with closing(cast("Any", loop.feed.data.batches(options))) as batches:
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
        total = 0.9 * total + loss
        weight = 0.9 * weight + 1
        smoothed.append(total / weight)
    return tuple(smoothed)


def _steepest(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Rate in the middle of the tenth of the updates over which the smoothed loss falls most, without the first."""
    from statistics import median  # takes 2 ms of everybody's import

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
