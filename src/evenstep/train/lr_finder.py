"""Finds a learning rate by updates at rising rates, after which the state is restored."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, cast, final

from annotated_types import Ge, Gt

from evenstep.data import ReadOptions
from evenstep.data.seeding import undisturbed
from evenstep.errors import ArgumentError
from evenstep.parallel import mapped
from evenstep.pipeline import PipelineModel
from evenstep.schema import Positive, option
from evenstep.train.tasks.now import TaskHook
from evenstep.train.update.outcome import Committed

if TYPE_CHECKING:
    from evenstep.train.loop import Loop
    from evenstep.train.trainer import Trainer

_SMOOTHING = 0.9  # share of the average of earlier losses


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLr:
    """Tried rates of the optimizer's first group, the losses of their updates, and a rate that is suggested.

    The suggestion is None where the smoothed loss fell by no more than the median difference of neighbouring losses.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    suggestion: float | None

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Bias-corrected moving average of the losses: s_k = Σ_{j≤k} β^{k-j} l_j / Σ_{j≤k} β^{k-j}, β = 0.9."""
        return _smoothed(self.losses)


@final
@option
class RateRange:
    """Learning rates to try."""

    lowest: Positive = 1e-7
    """The first rate."""
    highest: Positive = 1.0
    """The last rate, above `lowest`."""
    updates: Annotated[int, Ge(3)] = 100
    """How many updates to make at most."""
    divergence: Annotated[float, Gt(1)] = 4.0
    """Stop when the smoothed loss is above this many times the smallest so far."""

    def __post_init__(self) -> None:
        if self.highest <= self.lowest:
            raise ArgumentError(
                f"`highest` must be a rate above the `lowest` of {self.lowest}, but is {self.highest}.", field="highest"
            )

    def rate_of(self, number: int) -> float:
        """Rate of update `number`, counted from 1."""
        return self.lowest * (self.highest / self.lowest) ** ((number - 1) / (self.updates - 1))


def find_lr(
    trainer: "Trainer",
    *,
    lowest: float = 1e-7,
    highest: float = 1.0,
    updates: int = 100,
    divergence: float = 4.0,
) -> FoundLr:
    """Try learning rates from `lowest` to `highest`, and restore the state; all ranks call it together.

    Update k of n has the rate lowest · (highest / lowest)^((k - 1) / (n - 1)) in the optimizer's first group, and the
    others in proportion. It stops when the smoothed loss is above `divergence` times the smallest so far. Hooks and
    writers are not called. A second copy of the state is in memory.

    Raises:
        ArgumentError: a number out of its range, a model in stages, data that can't be read again, or fewer than three
            updates before the loss diverges.

    Reference: Smith, "Cyclical learning rates for training neural networks", WACV 2017, §3.3.

    >>> from torch import nn, optim, tensor
    >>> from evenstep import MapData, Task, Trainer
    >>> class Line(Task):
    ...     loss = lambda self, output, batch: ((output - batch[1]) ** 2).sum()
    >>> model, pairs = nn.Linear(1, 1), [(tensor([float(x)]), tensor([2.0 * x])) for x in range(8)]
    >>> trainer = Trainer(model=model, task=Line(), optimizer=optim.SGD(model.parameters(), lr=1.0),
    ...                   data=MapData(pairs, global_batch_size=4), updates=200, device="cpu")
    >>> found = find_lr(trainer, lowest=1e-4, highest=10.0, updates=50)
    >>> 1e-4 < found.suggestion < 1.0, trainer.progress.update
    (True, 0)
    """
    from evenstep.train.trainer import idle_loop

    tried = RateRange(lowest=lowest, highest=highest, updates=updates, divergence=divergence)
    return search(idle_loop(trainer, "find_lr"), tried)


def search(loop: "Loop", tried: RateRange) -> FoundLr:
    _check(loop)
    engine = loop.engine
    begin = engine.progress.update
    state = mapped(loop.checkpointer.state.state_dict(whole=True), lambda one: one.detach().clone())
    engine.group.go_on()
    engine.parts.prepare()
    try:
        with undisturbed(engine.parts.context.device), engine.bus.silent(but=TaskHook):
            with engine.parts.core.learning_rates.override(lambda update: tried.rate_of(update - begin)):
                losses = [*_losses(loop, tried)]
            loop.checkpointer.load(state)
    finally:
        loop.feed.data.close()
    if len(losses) < 3:
        raise ArgumentError(
            f"only {len(losses)} updates could be made before the loss diverged or the data ended, but three are "
            f"needed; begin at a lower rate, or try more updates."
        )
    rates = tuple(tried.rate_of(number) for number in range(1, len(losses) + 1))
    return FoundLr(rates=rates, losses=tuple(losses), suggestion=_steepest(rates, losses))


def _losses(loop: "Loop", tried: RateRange) -> Iterator[float]:
    engine, reducers = loop.engine, loop.engine.reducers
    batches = loop.feed.data.batches(
        ReadOptions(
            start=engine.progress.position,
            seed=engine.parts.context.seed,
            rank=reducers.rank,
            ranks=reducers.ranks,
            blocks=reducers.blocks,
        )
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
            if smoothed[-1] > tried.divergence * min(smoothed) or len(losses) == tried.updates:
                return


def _smoothed(losses: Sequence[float]) -> tuple[float, ...]:
    total, weight, smoothed = 0.0, 0.0, list[float]()
    for loss in losses:
        total, weight = _SMOOTHING * total + loss, _SMOOTHING * weight + 1
        smoothed.append(total / weight)
    return tuple(smoothed)


def _steepest(rates: tuple[float, ...], losses: Sequence[float]) -> float | None:
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


def _check(loop: "Loop") -> None:
    state = loop.feed.data.state
    if isinstance(loop.engine.model, PipelineModel) or loop.engine.group.can_change:
        raise ArgumentError(
            "`find_lr` restores a state that each rank holds whole: try it without stages, on ranks that stay.",
            field="find_lr",
        )
    if state is not None and state.positions == "epochs":
        raise ArgumentError(
            "`find_lr` reads batches that the run then reads again, but this stream can't say where it is; give it "
            "`state_dict` and `load_state_dict`, or try a dataset with a length.",
            field="find_lr",
        )
