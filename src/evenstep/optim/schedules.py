"""Learning-rate schedules: functions from the number of an update to a multiplier of each group's base rate.

u is the update's number from 1, U the length of the run, W = `warmup_updates`, s = max(W, 1), n = max(u - s, 0).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from math import cos, isfinite, pi, prod, sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Interval, MinLen

from evenstep.errors import ArgumentError
from evenstep.schema import Count, Natural, NonNegative, OneOf, Positive, Share, option

Need = Literal["epochs", "evaluations", "groups"]
Unit = Literal["updates", "epochs"]
DecayShape = Literal["linear", "cosine", "sqrt"]
Shrink = Annotated[float, Interval(gt=0, le=1)]

SHAPES: Mapping[DecayShape, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + cos(pi * progress)) / 2,
    "sqrt": lambda progress: 1 - sqrt(progress),
}
"""Falls r(p) from 1 at p = 0 to 0 at p = 1."""


def _share(done: int, length: int) -> float:
    if done <= 0:
        return 0.0
    return 1.0 if done >= length else done / length


class LrSchedule(ABC):
    """Multiplier of the base learning rate for every update."""

    @property
    def needs(self) -> Collection[Need]:
        """Inputs of the multiplier beside the update's number and the length of the run."""
        return ()

    @abstractmethod
    def __call__(self, update: int, updates: int | None) -> float:
        """Multiplier of an update, from 1, in a run of so many: finite, at least 0, above 0 at the first update."""

    def check(self, updates: int | None) -> None:
        """Raise ArgumentError if a run of this length can't follow the schedule."""

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        """Multiplier of an update whose batch is of `epoch`, which counts from 0."""
        return self(update, updates)

    def of_group(self, name: str) -> "LrSchedule":
        """Schedule of the optimizer's group of this name; a group without a name has its number."""
        return self


@option
class Warmup(LrSchedule):
    """Base of schedules that are min(u / W, 1) · f(n)."""

    warmup_updates: Natural = 0
    """Length of the linear warm-up to the full learning rate, in updates; 0 and 1 both mean none."""

    @property
    def full_at(self) -> int:
        """s, the first update at the full rate."""
        return max(self.warmup_updates, 1)

    def rise(self, update: int) -> float:
        """u / W for u < W, then 1."""
        return update / self.warmup_updates if update < self.warmup_updates else 1.0

    def formula(self, done: int, updates: int | None) -> float:
        """f(n)."""
        return 1.0

    def __call__(self, update: int, updates: int | None) -> float:
        return self.rise(update) * self.formula(max(update - self.full_at, 0), updates)

    def check(self, updates: int | None) -> None:
        self(1, updates)  # raises if it must know the length
        needed = 0
        for name in ("warmup_updates", "hold_updates", "decay_updates"):
            needed += getattr(self, name, None) or 0
            if updates is not None and needed > updates:
                raise ArgumentError(
                    f"the LR schedule needs {needed} updates, but the run has {updates}; lower `{name}`.",
                    field=name,
                )

    def _known(self, updates: int | None) -> int:
        if updates is None:
            raise ArgumentError(
                f"`updates` must be known for the LR schedule {type(self).__name__}, which ends with the run, but is "
                f"None; set it, or take a schedule without an end (Constant, InverseSqrt).",
                field="updates",
            )
        return updates


@option
class Constant(Warmup):
    """Warm-up, then 1.

    >>> [Constant(warmup_updates=2)(update, None) for update in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """


@option
class InverseSqrt(Warmup):
    """Warm-up to 1, then √(s / u), without an end (Vaswani et al., 2017, eq. 3, https://arxiv.org/abs/1706.03762)."""

    def formula(self, done: int, updates: int | None) -> float:
        return sqrt(self.full_at / (self.full_at + done))


@option
class Linear(Warmup):
    """Warm-up, then a fall to e = `end_factor`: e + (1 - e) · r(p), p = n / (U - s), along a line: r(p) = 1 - p."""

    end_factor: Share = 0.1
    """Multiplier of the learning rate at the last update; with 0 that update changes nothing."""

    def formula(self, done: int, updates: int | None) -> float:
        return self.fallen(_share(done, self._known(updates) - self.full_at))

    def fallen(self, progress: float) -> float:
        return self.end_factor + (1 - self.end_factor) * self.remaining(progress)

    def remaining(self, progress: float) -> float:
        """r(p): 1 at the beginning of the fall (p = 0), 0 at its end (p = 1)."""
        return 1 - progress


@option
class Cosine(Linear):
    """`Linear`, but along half a cosine: r(p) = (1 + cos(π p)) / 2.

    >>> [Cosine(warmup_updates=2, end_factor=0.0)(update, 4) for update in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    """

    def remaining(self, progress: float) -> float:
        return SHAPES["cosine"](progress)


@option
class Polynomial(Linear):
    """`Linear`, but with a power of the rest of the run: r(p) = (1 - p)ⁿ, n = `power`."""

    power: Positive = 1.0
    """The power; 1 is a straight line, more falls sooner."""

    def remaining(self, progress: float) -> float:
        return (1 - progress) ** self.power


@option
class Wsd(Linear):
    """Warm-up, stable, decay: `Linear`, but over the last D = `decay_updates` updates, p = max(u - (U - D), 0) / D.

        r(p) = 1 - p (linear), (1 + cos(π p)) / 2 (cosine), 1 - √p (sqrt)

    With D = 0 there is no decay, and the run's length need not be known.
    Reference: Hägele et al., 2024, https://arxiv.org/abs/2405.18392, which finds the sqrt shape best.
    """

    decay_updates: Natural
    """Length of the decay at the end of the run, in updates."""
    shape: DecayShape = "sqrt"
    """Shape of the decay."""

    def formula(self, done: int, updates: int | None) -> float:
        if not self.decay_updates:
            return 1.0
        begin = self._known(updates) - self.decay_updates
        return self.fallen(_share(self.full_at + done - begin, self.decay_updates))

    def remaining(self, progress: float) -> float:
        return SHAPES[self.shape](progress)


@option
class TriStage(Warmup):
    """Up from i = `start_factor`, stable for H = `hold_updates`, exponentially down to e = `end_factor`.

        i + (1 - i) · u / W                for u < W
        e^p, p = min(max(n - H, 0) / D, 1) from then on

    D is `decay_updates`; by default the rest of the run. Reference: Park et al., 2019, https://arxiv.org/abs/1904.08779.
    """

    hold_updates: Natural = 0
    """Updates at the full learning rate after the warm-up."""
    decay_updates: Count | None = None
    """Length of the decay, in updates; the rest of the run by default."""
    start_factor: Share = 0.0
    """Multiplier that the warm-up rises from."""
    end_factor: Shrink = 0.01
    """Multiplier after the decay; above 0, which an exponential never reaches."""

    def rise(self, update: int) -> float:
        if update >= self.warmup_updates:
            return 1.0
        return self.start_factor + (1 - self.start_factor) * update / self.warmup_updates

    def formula(self, done: int, updates: int | None) -> float:
        length = self.decay_updates
        if length is None:
            length = self._known(updates) - self.full_at - self.hold_updates
        return self.end_factor ** _share(done - self.hold_updates, length)


@option
class CosineRestarts(Warmup):
    """Half a cosine again and again, each period from the top, or from a lower one than the last.

        kⁱ · (e + (1 - e) · (1 + cos(π p)) / 2),  p = (n - b_i) / T_i in [0, 1)

    T_i = T · mⁱ is the length of period i = 0, 1, … and b_i = T_0 + … + T_{i-1} its begin. T is `period_updates`, m
    `period_factor`, k `shrink`, e `end_factor`. Reference: Loshchilov, Hutter, 2017, https://arxiv.org/abs/1608.03983.
    """

    period_updates: Count
    """Length of the first period, in updates."""
    period_factor: Annotated[float, Ge(1)] = 1.0
    """Length of each period as a multiple of that of the period before."""
    shrink: Shrink = 1.0
    """Highest learning rate of each period as a multiple of that of the period before."""
    end_factor: Share = 0.0
    """Multiplier that each period falls to, as a share of the multiplier at its begin."""

    def formula(self, done: int, updates: int | None) -> float:
        number, within = divmod(done, self.period_updates) if self.period_factor == 1 else (0, done)
        left = float(within)
        length = float(self.period_updates)
        while left >= length:
            number += 1
            left -= length
            length *= self.period_factor
        return self.shrink**number * (self.end_factor + (1 - self.end_factor) * SHAPES["cosine"](left / length))


@option
class Triangular(LrSchedule):
    """Cycles: a straight line up from `low_factor` l to the full learning rate, and one down again.

        l + (1 - l) · kᶜ · (1 - |2 p - 1|)    c = ⌊u / P⌋, p = u / P - c

    P is `period_updates`, k `shrink`. Reference: Smith, 2017, §3.2, https://arxiv.org/abs/1506.01186: `triangular` with
    k = 1, `triangular2` with k = 1/2; P is two of its step sizes.
    """

    period_updates: Count
    """Length of a cycle, in updates; the full learning rate is in its middle."""
    low_factor: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    """Multiplier between cycles."""
    shrink: Shrink = 1.0
    """Height of each cycle as a multiple of that of the cycle before."""

    def __call__(self, update: int, updates: int | None) -> float:
        cycle, within = divmod(update, self.period_updates)
        height = 1 - abs(2 * within / self.period_updates - 1)
        return self.low_factor + (1 - self.low_factor) * self.shrink**cycle * height


@option
class CountedSchedule(Warmup):
    """Base of min(u / W, 1) · f(n), n being the updates, or epochs, that are done; a warm-up is always in updates."""

    unit: Unit = "updates"
    """Unit of the counts: updates, or epochs; an update is of the epoch of its batch."""

    @property
    def needs(self) -> Collection[Need]:
        return ("epochs",) if self.unit == "epochs" else ()

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        return self.rise(update) * self.formula(epoch, updates) if self.unit == "epochs" else self(update, updates)


@option
class Step(CountedSchedule):
    """Warm-up to 1, then max(γ^⌊n / K⌋, m), with γ = `factor`, K = `every` and m = `min_factor`."""

    every: Count
    """Updates since the warm-up, or epochs, between two steps."""
    factor: Shrink = 0.1
    """Multiplies the learning rate at each step."""
    min_factor: Share = 0.0
    """Lower limit of the multiplier."""

    def formula(self, done: int, updates: int | None) -> float:
        return max(self.factor ** (done // self.every), self.min_factor)


@option
class Multiplicative(CountedSchedule):
    """Warm-up to 1, then max(γ_1 · γ_2 · … · γ_n, m) after n epochs, or updates; the last factor is repeated."""

    factors: Annotated[Sequence[Positive], MinLen(1)]
    """One factor for each epoch that has ended, such as [1.0, 1.0, 0.5]."""
    min_factor: Share = 0.0
    """Lower limit of the multiplier."""
    unit: Unit = "epochs"
    """Times of multiplications: after every epoch, or after every update since the warm-up."""

    def formula(self, done: int, updates: int | None) -> float:
        more = max(done - len(self.factors), 0)
        return max(prod(self.factors[:done]) * self.factors[-1] ** more, self.min_factor)


@option
class Listed(CountedSchedule):
    """Warm-up times f_i of the last pair (n_i, f_i) that has begun; n_i are updates, or epochs, numbered from 1."""

    factors: Annotated[Sequence[tuple[Count, Positive]], MinLen(1)]
    """Pairs of a begin, from 1, and a multiplier, such as [[1, 1.0], [1000, 0.1]]."""

    def __post_init__(self) -> None:
        begins = [begin for begin, _ in self.factors]
        if begins[0] != 1 or begins != sorted(set(begins)):
            raise ArgumentError(f"`factors` must begin with 1 and increase, but begin with {begins}.", field="factors")

    def __call__(self, update: int, updates: int | None) -> float:
        return self.rise(update) * self.formula(update - 1, updates)

    def formula(self, done: int, updates: int | None) -> float:
        return next(factor for begin, factor in reversed(self.factors) if begin <= done + 1)


@option
class Plateau(Warmup):
    """Warm-up to 1, then multiplied by a factor after every so many evaluations in a row without an improvement.

    A `Trainer` calls `evaluated` after each evaluation and saves the state. Other loops call it themselves.
    Evaluations during the warm-up do not count. As `torch.optim.lr_scheduler.ReduceLROnPlateau` with an absolute
    threshold and a patience smaller by 1.

    >>> schedule = Plateau(factor=0.5, patience_evaluations=2)
    >>> for update, loss in enumerate((1.0, 0.9, 0.95, 0.93), start=1):
    ...     schedule.evaluated(loss, update=update)
    >>> schedule(5, None)
    0.5
    """

    metric: str = "valid/loss"
    """Metric of an evaluation, such as `valid/loss`."""
    mode: Literal["min", "max"] = "min"
    """`min` if smaller is better, `max` if larger is better."""
    factor: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    """Multiplies the learning rate at each fall."""
    patience_evaluations: Count = 3
    """Evaluations in a row without an improvement before a fall."""
    min_delta: NonNegative = 0.0
    """Largest change that does not count as an improvement, in the metric's unit."""
    min_factor: Share = 0.0
    """Lower limit of the multiplier."""

    @cached_property
    def state(self) -> dict[str, Any]:
        """Product of all falls, best value, and evaluations without a better one."""
        return {"multiplier": 1.0, "best_value": None, "evaluations_since_best": 0}

    @property
    def needs(self) -> Collection[Need]:
        return ("evaluations",)

    def formula(self, done: int, updates: int | None) -> float:
        return self.state["multiplier"]

    def evaluated(self, value: float, *, update: int) -> None:
        """Count an evaluation's value of the metric, made after `update`; inf and NaN are no improvement."""
        if update < self.warmup_updates:
            return
        state = self.state
        best = state["best_value"]
        gain = 0.0 if best is None else best - value if self.mode == "min" else value - best
        state["evaluations_since_best"] += 1
        if isfinite(value) and (best is None or gain > self.min_delta):
            state["best_value"] = value
            state["evaluations_since_best"] = 0
        if state["evaluations_since_best"] >= self.patience_evaluations:
            state["multiplier"] = max(state["multiplier"] * self.factor, self.min_factor)
            state["evaluations_since_best"] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "mode": self.mode, **self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; of another metric, or an empty one, it begins at the full rate."""
        vars(self).pop("state", None)
        if (state.get("metric"), state.get("mode")) == (self.metric, self.mode):
            self.state.update({name: state[name] for name in self.state})


@option
class PerGroup(LrSchedule):
    """A schedule for each named group, and one for all others."""

    groups: Mapping[str | int, LrSchedule] = field(kw_only=False)
    """Schedules by the `name` of an optimizer's group, or its number. A schedule of `head` is also one of
    `head/no_decay`."""
    others: LrSchedule = field(default=Constant(), kw_only=False)
    """Schedule of all other groups."""

    @property
    def needs(self) -> Collection[Need]:
        return ("groups", *{need for one in self.every for need in one.needs})

    @property
    def every(self) -> list[LrSchedule]:
        return [*self.groups.values(), self.others]

    def __call__(self, update: int, updates: int | None) -> float:
        return self.others(update, updates)

    def check(self, updates: int | None) -> None:
        for schedule in self.every:
            schedule.check(updates)

    def of_group(self, name: str) -> LrSchedule:
        by_name = {str(key): schedule for key, schedule in self.groups.items()}
        return by_name.get(name) or by_name.get(name.partition("/")[0]) or self.others


def plateaus_of(schedule: LrSchedule | None) -> list[Plateau]:
    """The `Plateau`s in a schedule, each once."""
    inner = schedule.every if isinstance(schedule, PerGroup) else [schedule]
    return list({id(one): one for one in inner if isinstance(one, Plateau)}.values())


LR_SCHEDULES: Mapping[str, type[LrSchedule]] = {
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
"""LR schedules by their `kind` in run files."""

if TYPE_CHECKING:
    AnySchedule = LrSchedule
else:
    AnySchedule = Annotated[
        Any,
        OneOf("evenstep.optim.schedules:LrSchedule", "evenstep.optim.schedules:LR_SCHEDULES", default="constant"),
    ]
