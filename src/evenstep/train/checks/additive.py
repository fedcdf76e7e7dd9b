"""Tells from a few numbers whether a loss is a sum over its micro-batch, or what else it is.

A sum over units is the sum of its parts' sums, however the batch is cut. A mean lies between the means of its parts;
what compares samples with each other, or is added once per batch, does neither. It runs nothing, and knows no models.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

Kind = Literal["mean", "term", "whole", "weight", "count"]

SURE = 0.2  # of the losses: a mean differs from the sum of its halves by more
FAR = 100  # times what rounding makes of each unit: then the sign tells nothing that the size does not


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """What a task gave for a batch.

    Args:
        loss: summed, as the task says.
        count: of the units, as the loss itself says; None where it does not.
        metrics: (sum, weight) by name.
    """

    loss: float
    weight: float
    count: float | None = None
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])


class LossValues(NamedTuple):
    """What a task gave for some pieces of a micro-batch.

    Args:
        given: by the task for each batch, on the ranks that share it; None for one without a loss to compare.
        narrow: whether some of it was computed in 16 bits.
        out_of_memory: whether there was no memory for it here.
        out_of_memory_anywhere: whether a rank had none.
        done: how many batches were run before something was raised.
        error: what was raised, where the run can go on.
    """

    given: Sequence[LossValue | None] = ()
    narrow: bool = False
    out_of_memory: bool = False
    out_of_memory_anywhere: bool = False
    done: int = 0
    error: str = ""

    @property
    def known(self) -> list[LossValue]:
        """All that was given, if all of it can be compared; else nothing."""
        known = [one for one in self.given if one is not None and math.isfinite(one.loss) and math.isfinite(one.weight)]
        return known if len(known) == len(self.given) else []


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How exactly losses can be compared.

    Args:
        relative: the largest difference that rounding makes, of the largest number compared.
        per_unit: the largest that it makes of each unit: sums whose terms cancel are not compared more exactly.
    """

    relative: float
    per_unit: float


WIDE = Tolerance(relative=1e-3, per_unit=1e-6)
FAST = Tolerance(relative=1e-2, per_unit=1e-4)  # kernels of an accelerator, which may differ with the size of a batch
NARROW = Tolerance(relative=5e-2, per_unit=1e-2)  # some of it is computed in 16 bits


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """What a second look gave, where the first did not add up.

    Args:
        whole: the losses of the whole, computed once more with other random numbers.
        parts: the losses of the parts of each part; none where one can't be cut.
    """

    whole: Sequence[float]
    parts: Sequence[Sequence[float]]

    @property
    def is_random(self) -> bool:
        """Whether the whole had another loss each time, by more than rounding."""
        return max(self.whole) - min(self.whole) > 1e-6 * max(map(abs, self.whole))


def adds_up(whole: LossValue, parts: Sequence[LossValue], tolerance: Tolerance) -> bool:
    """Whether the loss of the whole is the sum of those of its parts, up to rounding.

    >>> halves = [LossValue(loss=1.0, weight=2), LossValue(loss=2.0, weight=2)]
    >>> adds_up(LossValue(loss=3.0, weight=4), halves, WIDE), adds_up(LossValue(loss=1.5, weight=4), halves, WIDE)
    (True, False)
    """
    losses = [part.loss for part in parts]
    return _is_sum(whole.loss, losses, tolerance.relative)


def weighs_whole(whole: LossValue, parts: Sequence[LossValue]) -> bool:
    """Whether the parts weigh together what the whole does."""
    return equal(math.fsum(part.weight for part in parts), whole.weight)


def kind_of(
    whole: LossValue, parts: Sequence[LossValue], again: SecondLook, tolerance: Tolerance
) -> tuple[Kind | None, float]:
    """What a loss is that does not add up, and the size of the term that is counted too often; None if it is not sure.

    >>> halves = [LossValue(loss=1.0, weight=2), LossValue(loss=2.0, weight=2)]
    >>> again = SecondLook(whole=[1.5], parts=[[0.9, 1.1], [1.5, 2.5]])
    >>> kind_of(LossValue(loss=1.5, weight=4), halves, again, WIDE)
    ('mean', 0.0)
    """
    losses = [part.loss for part in parts]
    scale = max(map(abs, (whole.loss, *losses)))
    noise = max((abs(one - whole.loss) for one in again.whole), default=0.0)
    excess = math.fsum(losses) - whole.loss
    if abs(excess) <= 5 * noise:
        return None, 0.0
    if _is_mean(whole, parts, again, noise, tolerance):
        return "mean", 0.0
    if noise > 1e-9 * scale or abs(excess) <= tolerance.per_unit * max(whole.weight, 1.0):
        return None, 0.0
    each = excess / (len(parts) - 1)
    deeper = [
        (math.fsum(theirs) - loss) / (len(theirs) - 1)
        for loss, theirs in zip(losses, again.parts, strict=True)
        if theirs
    ]
    if deeper and all(abs(one - each) <= max(tolerance.relative / 50 * scale, 1e-3 * abs(each)) for one in deeper):
        return "term", each
    if _is_far_from_sum(whole, parts, each, deeper, tolerance):
        return "whole", 0.0
    # rounding has no sign of its own, and shrinks as the parts do
    alike = all(one * each > 0 and abs(each) / 30 < abs(one) < 30 * abs(each) for one in deeper)
    return ("whole" if alike and (deeper or abs(each) > SURE / 4 * scale) else None), 0.0


def _is_far_from_sum(
    whole: LossValue, parts: Sequence[LossValue], each: float, deeper: Sequence[float], tolerance: Tolerance
) -> bool:
    """Whether the whole is further from the sum of its parts than rounding goes: by much, or one of its parts as well,
    or where they are single samples, of which nothing more is to be learned.

    Single samples, and pairs of them, may have nothing to be compared with, and so no loss.
    """

    def is_far(value: LossValue, excess: float) -> bool:
        least = max(tolerance.relative * abs(value.loss), FAR * tolerance.per_unit * max(value.weight, 1.0))
        return abs(excess) > least

    scale = max(abs(whole.loss), *(abs(part.loss) for part in parts))
    return is_far(whole, each) and (abs(each) > SURE * scale or not deeper or any(map(is_far, parts, deeper)))


def _is_mean(
    whole: LossValue, parts: Sequence[LossValue], again: SecondLook, noise: float, tolerance: Tolerance
) -> bool:
    """Whether the whole lies between its parts, as means do, and not near their sum."""
    losses = [part.loss for part in parts]
    scale = max(map(abs, (whole.loss, *losses)))
    if abs(math.fsum(losses) - whole.loss) <= SURE * scale:
        return False
    weights = [part.weight for part in parts]
    if math.fsum(weights) > 0:
        mean = math.fsum(w * one for w, one in zip(weights, losses, strict=True)) / math.fsum(weights)
        if abs(whole.loss - mean) <= max(tolerance.relative * scale, 5 * noise):
            return True
    margin = tolerance.relative * scale + 5 * noise
    levels = [(whole.loss, losses), *zip(losses, again.parts, strict=True)]
    return scale > 10 * tolerance.per_unit and all(
        min(theirs) - margin <= one <= max(theirs) + margin and min(theirs) * max(theirs) > 0
        for one, theirs in levels
        if theirs
    )


def means_among(whole: LossValue, parts: Sequence[LossValue]) -> dict[str, float]:
    """The metrics that are given as means: as (mean, 1), which is logged as a mean of means; each with its weight.

    >>> halves = [LossValue(loss=0.0, weight=2, metrics={"right": (one, 1)}) for one in (0.5, 1.0)]
    >>> means_among(LossValue(loss=0.0, weight=4, metrics={"right": (0.75, 1)}), halves)
    {'right': 1}
    """
    found: dict[str, float] = {}
    for name, (total, weight) in whole.metrics.items():
        theirs = [part.metrics[name] for part in parts if name in part.metrics]
        sums = [one for one, _ in theirs]
        if len(theirs) != len(parts) or any(w != weight for _, w in theirs) or weight == 0:
            continue
        apart = max(sums) - min(sums) > 1e-3 * max(map(abs, sums))
        if apart and min(sums) <= total <= max(sums) and not _is_sum(total, sums, 1e-3):
            found[name] = weight
    return found


def sums_among(whole: LossValue, parts: Sequence[LossValue]) -> dict[str, float]:
    """The metrics that are given as means over units that add up, but whose values do; each with its value.

    >>> halves = [LossValue(loss=0.0, weight=2, metrics={"right": (2.0 * one, 2)}) for one in (1.0, 2.0)]
    >>> sums_among(LossValue(loss=0.0, weight=4, metrics={"right": (4 * 3.0, 4)}), halves)
    {'right': 3.0}
    """
    found: dict[str, float] = {}
    for name, (total, weight) in whole.metrics.items():
        theirs = [part.metrics[name] for part in parts if name in part.metrics]
        if len(theirs) != len(parts) or not all((weight, *(w for _, w in theirs))):
            continue
        values = [one / w for one, w in theirs]
        is_pair = _is_sum(total, [one for one, _ in theirs], 1e-3)
        if _is_sum(total / weight, values, 1e-5) and not is_pair and equal(weight, math.fsum(w for _, w in theirs)):
            found[name] = total / weight
    return found


def unlike_among(whole: LossValue, parts: Sequence[LossValue], tolerance: Tolerance) -> list[str]:
    """The metrics of which the parts do not give together what the whole gives, such as a root or a ratio of sums.

    >>> halves = [LossValue(loss=0.0, weight=2, metrics={"rms": (2 * one, 2)}) for one in (1.0, 3.0)]
    >>> unlike_among(LossValue(loss=0.0, weight=4, metrics={"rms": (4 * math.sqrt(5), 4)}), halves, WIDE)
    ['rms']
    """
    found: list[str] = []
    for name, (total, weight) in whole.metrics.items():
        theirs = [part.metrics[name] for part in parts if name in part.metrics]
        if len(theirs) != len(parts) or not all((weight, *(w for _, w in theirs))):
            continue
        together = math.fsum(one for one, _ in theirs) / math.fsum(w for _, w in theirs)
        scale = max(abs(one / w) for one, w in ((total, weight), *theirs))
        # of many answers a few may be others by rounding
        if abs(together - total / weight) > max(tolerance.relative * scale, FAR * tolerance.per_unit):
            found.append(name)
    return found


def _is_sum(total: float, parts: Sequence[float], relative: float) -> bool:
    scale = max(map(abs, (total, *parts)), default=0.0)
    return abs(math.fsum(parts) - total) <= relative * scale


def equal(one: float, other: float) -> bool:
    """Whether two sums are the same, but for the digits of float32."""
    return math.isclose(one, other, rel_tol=1e-6)
