"""Learning-rate schedules: functions from the number of an update to a multiplier of each group's base rate.

u is the update's number from 1, U the length of the run. Updates are numbered as they commit, so a retried update has
the same rate, and a resumed run needs no state of its schedule; only `Plateau` has one.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import cos, inf, isfinite, pi, prod, sqrt
from typing import Any, Literal, Self, final

from evenstep.errors import ArgumentError

Need = Literal["epochs", "evaluations", "groups"]


class LrSchedule(ABC):
    """A multiplier of the base LR for every update."""

    __slots__ = ()

    @property
    def needs(self) -> Collection[Need]:
        """Further inputs of the multiplier, beside the update's number and the length of the run."""
        return ()

    @abstractmethod
    def __call__(self, update: int, updates: int | None) -> float:
        """The multiplier: finite, at least 0, and above 0 at the first update; mostly at most 1.

        Args:
            update: the update's number, from 1.
            updates: the length of the run; None if that is not known.
        """

    @abstractmethod
    def check(self, updates: int | None) -> None:
        """Raise ArgumentError unless a run of so many updates can follow this schedule."""

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        """The multiplier of an update whose batch is of `epoch`, which counts from 0 as in events."""
        return self(update, updates)

    def of_group(self, name: str) -> "LrSchedule":
        """The schedule of the optimizer's group of this name, or of this number where it has none."""
        return self


def warmup_factor(update: int, warmup_updates: int) -> float:
    """k / W for update k of a warm-up of W updates, then 1.

    >>> [warmup_factor(update, 4) for update in range(1, 6)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return update / warmup_updates if update < warmup_updates else 1.0


def check_warmup(warmup_updates: int, updates: int | None) -> None:
    """Raise ArgumentError if the warm-up is longer than the run, where its length is known."""
    if updates is not None and warmup_updates > updates:
        raise ArgumentError(
            f"`warmup_updates` must be at most the {updates} updates of the run, but is {warmup_updates}; lower it or "
            f"train longer.",
            field="warmup_updates",
        )


Unit = Literal["updates", "epochs"]
DecayShape = Literal["linear", "cosine", "sqrt"]


def decay_progress(update: int, begin_update: int, end_update: int) -> float:
    """Progress of a decay: 0 up to update `begin_update`, 1 from `end_update` on, a straight line between.

    >>> [decay_progress(update, 2, 4) for update in range(1, 6)]
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    if update <= begin_update:
        return 0.0
    if update >= end_update:
        return 1.0
    return (update - begin_update) / (end_update - begin_update)


def _known(updates: int | None, schedule: LrSchedule) -> int:
    if updates is None:
        raise ArgumentError(
            f"`updates` must be known for the LR schedule {type(schedule).__name__}, which ends with the run, but is "
            f"None; set it, or take a schedule without an end (Constant, InverseSqrt).",
            field="updates",
        )
    return updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup(LrSchedule):
    """A schedule that begins with a warm-up, u / W for u < W; 0 and 1 both mean none."""

    warmup_updates: int = 0

    def check(self, updates: int | None) -> None:
        check_warmup(self.warmup_updates, updates)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Warmup):
    """Warm-up, then 1.

    >>> [Constant(warmup_updates=2)(update, None) for update in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """

    def __call__(self, update: int, updates: int | None) -> float:
        return warmup_factor(update, self.warmup_updates)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt(Warmup):
    """Warm-up to 1, then √(s / u), s = max(W, 1): a slow fall without an end.

    Reference: Vaswani et al., "Attention is all you need", NeurIPS 2017, eq. 3, with a peak of 1.

    >>> [InverseSqrt(warmup_updates=4)(update, None) for update in (2, 4, 16)]
    [0.5, 1.0, 0.5]
    """

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        return sqrt(max(self.warmup_updates, 1) / update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decay(Warmup):
    """Warm-up to 1, then a fall that reaches its end e at the last update U; with e = 0 that update changes nothing.

    u / W                      for u < W
    e + (1 - e) · r(p)         from then on, p = (u - s) / (U - s), s = max(W, 1)
    """

    end_factor: float = 0.1

    @abstractmethod
    def _remaining(self, progress: float) -> float:
        """r(p): 1 at the beginning of the fall (p = 0), 0 at its end (p = 1)."""

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        progress = decay_progress(update, max(self.warmup_updates, 1), _known(updates, self))
        return self.end_factor + (1 - self.end_factor) * self._remaining(progress)

    def check(self, updates: int | None) -> None:
        check_warmup(self.warmup_updates, _known(updates, self))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Decay):
    """A `Decay` with r(p) = 1 - p.

    >>> [Linear(warmup_updates=2, end_factor=0.0)(update, 4) for update in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    """

    def _remaining(self, progress: float) -> float:
        return 1 - progress


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Decay):
    """A `Decay` with r(p) = (1 + cos(π p)) / 2; no restarts.

    Reference: Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, eq. 5.

    >>> [Cosine(warmup_updates=2, end_factor=0.0)(update, 4) for update in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    """

    def _remaining(self, progress: float) -> float:
        return (1 + cos(pi * progress)) / 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial(Decay):
    """A `Decay` with r(p) = (1 - p)ⁿ, n = `power`: 1 is a straight line, more falls sooner.

    >>> [Polynomial(power=2.0, end_factor=0.0)(update, 3) for update in (1, 2, 3)]
    [1.0, 0.25, 0.0]
    """

    power: float = 1.0

    def _remaining(self, progress: float) -> float:
        return (1 - progress) ** self.power


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wsd(Warmup):
    """Warm-up to 1, stable at 1, then a decay over the last D updates, which reaches its end e at the last one.

        u / W                  for u < W
        e + (1 - e) · r(p)     from then on, p = (u - (U - D)) / D, or 0 before that

        r(p) = 1 - p           linear
               (1 + cos(π p)) / 2    cosine
               1 - √p          sqrt

    With D = 0 there is no decay, and the run's length need not be known.

    Reference: Hägele et al., "Scaling laws and compute-optimal training beyond fixed training durations",
    NeurIPS 2024, which finds the sqrt shape best.

    >>> schedule = Wsd(warmup_updates=2, decay_updates=2, shape="linear", end_factor=0.0)
    >>> [schedule(update, 6) for update in range(1, 7)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    decay_updates: int
    shape: DecayShape = "sqrt"
    end_factor: float = 0.1

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates or self.decay_updates == 0:
            return warmup_factor(update, self.warmup_updates)
        end_update = _known(updates, self)
        progress = decay_progress(update, end_update - self.decay_updates, end_update)
        return self.end_factor + (1 - self.end_factor) * _SHAPES[self.shape](progress)

    def check(self, updates: int | None) -> None:
        if self.decay_updates == 0 and updates is None:
            return
        total = _known(updates, self)
        check_warmup(self.warmup_updates, total)
        if self.decay_updates and max(self.warmup_updates, 1) + self.decay_updates > total:
            raise ArgumentError(
                f"`warmup_updates` plus `decay_updates` must be at most the {total} updates of the run, one of them at "
                f"the full learning rate, but are {self.warmup_updates} and {self.decay_updates}; lower them or train "
                f"longer.",
                field="decay_updates",
            )


_SHAPES: Mapping[DecayShape, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + cos(pi * progress)) / 2,
    "sqrt": lambda progress: 1 - sqrt(progress),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TriStage(Warmup):
    """From a share i of the base LR up to it, stable for H updates, then exponentially down to another share e.

        i + (1 - i) · u / W    for u < W
        1                      for the H updates after that (and for u = W)
        e^p                    from then on, p = (u - s - H) / D up to 1, s = max(W, 1)

    D is `decay_updates`; None takes all that are left of the run.

    Reference: Park et al., "SpecAugment: a simple data augmentation method for automatic speech recognition",
    Interspeech 2019, §3.2 (ramp up, hold, exponential decay; there with i = 0 and e = 0.01).

    >>> schedule = TriStage(warmup_updates=2, hold_updates=1, decay_updates=2, end_factor=0.25)
    >>> [schedule(update, None) for update in range(1, 8)]
    [0.5, 1.0, 1.0, 0.5, 0.25, 0.25, 0.25]
    """

    hold_updates: int = 0
    decay_updates: int | None = None
    start_factor: float = 0.0
    end_factor: float = 0.01

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return self.start_factor + (1 - self.start_factor) * update / self.warmup_updates
        begin = self._decay_begins
        if update <= begin:
            return 1.0
        end = _known(updates, self) if self.decay_updates is None else begin + self.decay_updates
        return self.end_factor ** decay_progress(update, begin, end)

    @property
    def _decay_begins(self) -> int:
        return max(self.warmup_updates, 1) + self.hold_updates

    def check(self, updates: int | None) -> None:
        if updates is None and self.decay_updates is not None:
            return
        total = _known(updates, self)
        check_warmup(self.warmup_updates, total)
        decay = self.decay_updates or 0
        if (self.hold_updates or decay) and self._decay_begins + decay > total:
            raise ArgumentError(
                f"`warmup_updates`, `hold_updates` and `decay_updates` must together be at most the {total} updates of "
                f"the run, but are {self.warmup_updates}, {self.hold_updates} and {decay}; lower them or train longer.",
                field="hold_updates",
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CosineRestarts(Warmup):
    """Warm-up to 1, then periods of cosine decay; each begins at the full LR, or at a smaller one than the last.

        u / W                                    for u < W
        kⁱ · (e + (1 - e) · (1 + cos(π p)) / 2)  from then on, p = (u - s - b_i) / T_i in [0, 1), s = max(W, 1)

    T_i = T · mⁱ is the length of period i = 0, 1, … and b_i = T_0 + … + T_{i-1} its begin, so the first update of a
    period has its full LR. T is `period_updates`, m `period_factor`, k `shrink`, e `end_factor`.

    Reference: Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, eq. 5, and §4.1
    for the period factor T_mult.

    >>> schedule = CosineRestarts(period_updates=2, period_factor=2, shrink=0.5, end_factor=0.0)
    >>> [round(schedule(update, None), 3) for update in range(1, 8)]
    [1.0, 0.5, 0.5, 0.427, 0.25, 0.073, 0.25]
    """

    period_updates: int
    period_factor: float = 1.0
    shrink: float = 1.0
    end_factor: float = 0.0

    def __call__(self, update: int, updates: int | None) -> float:
        if update < self.warmup_updates:
            return warmup_factor(update, self.warmup_updates)
        number, done = self._period(update - max(self.warmup_updates, 1))
        return self.shrink**number * (self.end_factor + (1 - self.end_factor) * (1 + cos(pi * done)) / 2)

    def _period(self, since: int) -> tuple[int, float]:
        if self.period_factor == 1:
            number, within = divmod(since, self.period_updates)
            return number, within / self.period_updates
        number, begin, length = 0, 0.0, float(self.period_updates)
        while since >= begin + length:  # whole numbers are exact here, and there are few: each is longer
            number += 1
            begin += length
            length *= self.period_factor
        return number, (since - begin) / length


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Triangular(LrSchedule):
    """Cycles from a share of the base LR up to it and down again; it begins at the bottom, which is its warm-up.

        l + (1 - l) · kᶜ · (1 - |2 p - 1|)    c = ⌊u / P⌋, p = u / P - c

    P is `period_updates`, l `low_factor`, k `shrink`; the full LR is in the middle of a cycle.

    Reference: Smith, "Cyclical learning rates for training neural networks", WACV 2017, §3.2: `triangular` with k = 1,
    `triangular2` with k = 1/2; P is two of its step sizes.

    >>> schedule = Triangular(period_updates=4, low_factor=0.5, shrink=0.5)
    >>> [schedule(update, None) for update in range(1, 9)]
    [0.75, 1.0, 0.75, 0.5, 0.625, 0.75, 0.625, 0.5]
    """

    period_updates: int
    low_factor: float = 0.1
    shrink: float = 1.0

    def __call__(self, update: int, updates: int | None) -> float:
        cycle, within = divmod(update, self.period_updates)
        height = 1 - abs(2 * within / self.period_updates - 1)
        return self.low_factor + (1 - self.low_factor) * self.shrink**cycle * height

    def check(self, updates: int | None) -> None:
        if updates is not None and self.period_updates > 2 * updates:
            raise ArgumentError(
                f"`period_updates` must be at most twice the {updates} updates of the run, so that the full LR is "
                f"reached, but is {self.period_updates}; lower it or train longer.",
                field="period_updates",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSchedule(Warmup):
    """Warm-up times a multiplier of how many updates, or epochs, are done: min(u / W, 1) · f(n).

    In epochs, all updates of an epoch have the same multiplier. An epoch is that of the update's batch, so a resumed
    run has the same. A warm-up is always in updates.
    """

    unit: Unit = "updates"

    @abstractmethod
    def after(self, done: int) -> float:
        """f(n): the multiplier when n updates or epochs are done."""

    def __call__(self, update: int, updates: int | None) -> float:
        return self.in_epoch(update, 0, updates)

    @property
    def needs(self) -> Collection[Need]:
        return ("epochs",) if self.unit == "epochs" else ()

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        done = epoch if self.unit == "epochs" else self._updates_done(update)
        return warmup_factor(update, self.warmup_updates) * self.after(done)

    def _updates_done(self, update: int) -> int:
        return max(update - max(self.warmup_updates, 1), 0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step(CountedSchedule):
    """Warm-up to 1, then max(γ^⌊n / K⌋, m): multiplied by γ = `factor` after every K = `every` updates, or epochs.

    Reference: He et al., "Deep residual learning for image recognition", CVPR 2016, §3.4: divided by 10 at plateaus
    that are known; `torch.optim.lr_scheduler.StepLR` is the case W = 0, m = 0.

    >>> [Step(every=2, factor=0.5)(update, None) for update in range(1, 6)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    every: int
    factor: float = 0.1
    min_factor: float = 0.0

    def after(self, done: int) -> float:
        return max(self.factor ** (done // self.every), self.min_factor)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicative(CountedSchedule):
    """Warm-up to 1, then max(γ_1 · γ_2 · … · γ_n, m) after n epochs, or updates; the last factor goes on.

    Reference: `torch.optim.lr_scheduler.MultiplicativeLR`, and with one factor `ExponentialLR`.

    >>> schedule = Multiplicative(factors=(1.0, 0.5))  # two epochs at the full LR, then half of it, a quarter, …
    >>> [schedule.in_epoch(1, epoch, None) for epoch in range(4)]
    [1.0, 1.0, 0.5, 0.25]
    """

    factors: tuple[float, ...]
    min_factor: float = 0.0
    unit: Unit = "epochs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))

    def after(self, done: int) -> float:
        more = max(done - len(self.factors), 0)
        return max(prod(self.factors[:done]) * self.factors[-1] ** more, self.min_factor)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(CountedSchedule):
    """Warm-up times f_i of the last pair (n_i, f_i) that has begun, n_i being numbers of updates, or epochs, from 1.

    Reference: `torch.optim.lr_scheduler.MultiStepLR` is the case of powers of one factor.

    >>> schedule = Listed(factors=((1, 1.0), (3, 0.1)))
    >>> [schedule(update, None) for update in range(1, 5)]
    [1.0, 1.0, 0.1, 0.1]
    """

    factors: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(tuple(pair) for pair in self.factors))
        _require_pairs("factors", self.factors)

    @classmethod
    def of_rates(
        cls, rates: Sequence[tuple[int, float]], *, lr: float, unit: Unit = "updates", warmup_updates: int = 0
    ) -> Self:
        """The same from learning rates instead of multipliers.

        Args:
            rates: pairs (begin, learning rate).
            lr: the optimizer's rate, which multipliers are of. Groups with another keep their proportion.

        >>> Listed.of_rates([(1, 0.2), (10, 0.1)], lr=0.2).factors
        ((1, 1.0), (10, 0.5))
        """
        _require_pairs("rates", rates)
        pairs = tuple((begin, rate / lr) for begin, rate in rates)
        return cls(factors=pairs, unit=unit, warmup_updates=warmup_updates)

    def check(self, updates: int | None) -> None:
        check_warmup(self.warmup_updates, updates)
        last = self.factors[-1][0]
        if updates is not None and self.unit == "updates" and last > updates:
            raise ArgumentError(
                f"`factors` must begin within the {updates} updates of the run, but one begins at {last}, which would "
                f"have no effect; leave it out or train longer.",
                field="factors",
            )

    def after(self, done: int) -> float:
        return self.factors[bisect_right([begin for begin, _ in self.factors], done + 1) - 1][1]

    def _updates_done(self, update: int) -> int:
        return update - 1  # they are numbered by the run, warm-up included


def _require_pairs(name: str, pairs: Sequence[Any]) -> None:
    begins = [begin for begin, _ in pairs]
    is_ordered = bool(begins) and begins[0] == 1 and begins == sorted(set(begins))
    fits = is_ordered and all(type(begin) is int and 0 < value < inf for begin, value in pairs)
    if not fits:
        raise ArgumentError(
            f"`{name}` must be pairs (begin, value above 0) in order, the first with begin 1, but is {pairs!r}.",
            field=name,
        )


@final
class PerGroup(LrSchedule):
    """A schedule for each named group, and one for all others.

    Args:
        groups: schedules by the `name` of an optimizer's group, or its number. The schedule of `head` is also that of
            `head/no_decay`.
        others: schedule of all other groups.

    >>> schedule = PerGroup({"head": Cosine()})
    >>> schedule.of_group("head"), schedule.of_group("1")
    (Cosine(warmup_updates=0, end_factor=0.1), Constant(warmup_updates=0))
    """

    def __init__(self, groups: Mapping[str | int, LrSchedule], others: LrSchedule | None = None) -> None:
        self.groups = {str(name): one for name, one in groups.items()}
        self.others = Constant() if others is None else others

    @property
    def needs(self) -> Collection[Need]:
        return ("groups", *{need for one in (*self.groups.values(), self.others) for need in one.needs})

    def __call__(self, update: int, updates: int | None) -> float:
        return self.others(update, updates)

    def check(self, updates: int | None) -> None:
        for schedule in (*self.groups.values(), self.others):
            schedule.check(updates)

    def of_group(self, name: str) -> LrSchedule:
        whole = name.partition("/")[0]  # of a group that layer-wise decay, say, has divided
        return self.groups.get(name) or self.groups.get(whole) or self.others


_STATE = ("multiplier", "best_value", "evaluations_since_best", "cooldown_left")


@final
class Plateau(LrSchedule):
    """Warm-up to 1, then multiplied by a factor after every so many evaluations in a row without an improvement.

    A `Trainer` calls `evaluated` after each evaluation and saves the state. Other loops call it themselves.

    Args:
        metric: evaluation and metric, such as "valid/loss".
        mode: "min" if lower values are better, "max" if higher ones are.
        factor: multiplies the multiplier at each fall.
        patience_evaluations: evaluations in a row without an improvement before a fall. The patience of
            `torch.optim.lr_scheduler.ReduceLROnPlateau` is smaller by 1.
        min_delta: smallest improvement that counts.
        relative: True if `min_delta` is a fraction of the best value.
        cooldown_evaluations: number of evaluations after a fall that do not count.
        min_factor: lower limit of the multiplier.
        warmup_updates: W, length of the warm-up; 0 and 1 both mean none. Evaluations during it do not count.

    Attributes:
        multiplier: the product of all falls.
        best_value: best finite value of the metric; None at first.
        evaluations_since_best: evaluations without an improvement since the best one, or since the last fall.
        cooldown_left: number of following evaluations that do not count.

    Reference: `torch.optim.lr_scheduler.ReduceLROnPlateau`, except that relative improvements of a negative best value
    are fractions of |best|.

    >>> schedule = Plateau(factor=0.5, patience_evaluations=2)
    >>> for update, loss in enumerate((1.0, 0.9, 0.95, 0.93), start=1):
    ...     schedule.evaluated(loss, update=update)
    >>> schedule(5, None)
    0.5
    """

    def __init__(
        self,
        *,
        metric: str = "valid/loss",
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience_evaluations: int = 3,
        min_delta: float = 0.0,
        relative: bool = False,
        cooldown_evaluations: int = 0,
        min_factor: float = 0.0,
        warmup_updates: int = 0,
    ) -> None:
        self.metric = metric
        self.factor = factor
        self.mode: Literal["min", "max"] = mode
        self.patience_evaluations = patience_evaluations
        self.cooldown_evaluations = cooldown_evaluations
        self.min_delta = min_delta
        self.relative = relative
        self.min_factor = min_factor
        self.warmup_updates = warmup_updates
        self.reset()

    def reset(self) -> None:
        """Forget all evaluations."""
        self.multiplier = 1.0
        self.best_value: float | None = None
        self.evaluations_since_best = 0
        self.cooldown_left = 0

    @property
    def needs(self) -> Collection[Need]:
        return ("evaluations",)

    def __call__(self, update: int, updates: int | None) -> float:
        return warmup_factor(update, self.warmup_updates) * self.multiplier

    def check(self, updates: int | None) -> None:
        check_warmup(self.warmup_updates, updates)

    def evaluated(self, value: float, *, update: int) -> None:
        """Take an evaluation's value of the metric, made after `update`; inf and NaN are no improvement."""
        if update < self.warmup_updates:
            return
        if self._is_better(value):
            self.best_value = value
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
        if self.cooldown_left:
            self.cooldown_left -= 1
            self.evaluations_since_best = 0
        if self.evaluations_since_best >= self.patience_evaluations:
            self.multiplier = max(self.multiplier * self.factor, self.min_factor)
            self.cooldown_left = self.cooldown_evaluations
            self.evaluations_since_best = 0

    def _is_better(self, value: float) -> bool:
        if not isfinite(value):
            return False
        if self.best_value is None:
            return True
        gain = self.best_value - value if self.mode == "min" else value - self.best_value
        return gain > self.min_delta * (abs(self.best_value) if self.relative else 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, **{name: getattr(self, name) for name in _STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Load a state; gives half a sentence if it is of another metric and is not used, else ""."""
        self.reset()
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            return (
                f"the LR schedule follows `{self.metric}` ({self.mode}) instead of `{state['metric']}` "
                f"({state['mode']}), and begins at the full rate"
            )
        for name in _STATE:
            setattr(self, name, state[name])
        return ""


def plateaus_of(schedule: LrSchedule | None) -> list[Plateau]:
    """The `Plateau`s in a schedule, each once."""
    inner = [*schedule.groups.values(), schedule.others] if isinstance(schedule, PerGroup) else [schedule]
    return list({id(one): one for one in inner if isinstance(one, Plateau)}.values())


LR_SCHEDULES: Mapping[str, Callable[..., LrSchedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_restarts": CosineRestarts,
    "wsd": Wsd,
    "inverse_sqrt": InverseSqrt,
    "polynomial": Polynomial,
    "tri_stage": TriStage,
    "triangular": Triangular,
    "step": Step,
    "multiplicative": Multiplicative,
    "listed": Listed,
    "plateau": Plateau,
}

__all__ = [
    "LR_SCHEDULES",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "CountedSchedule",
    "InverseSqrt",
    "Linear",
    "Listed",
    "LrSchedule",
    "Multiplicative",
    "PerGroup",
    "Plateau",
    "Polynomial",
    "Step",
    "TriStage",
    "Triangular",
    "Wsd",
    "plateaus_of",
]
