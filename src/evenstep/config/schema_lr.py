"""The LR schedules of the run file: one class per `kind`, with the fields of its namesake in `evenstep.optim`.

The default `kind` is constant. What each does to the learning rate is told there.
"""

from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field

from evenstep.config.section import Count, Natural, NonNegative, NumberedFactors, Positive, Section, Share
from evenstep.optim import schedules
from evenstep.options import default_of

Unit = Literal["updates", "epochs"]


class ScheduleTable(Section):
    """What all LR schedules have."""

    warmup_updates: Natural = default_of(schedules.Constant, "warmup_updates")
    """Length of the linear rise to the full learning rate, in updates; 0 and 1 both mean none."""


class ConstantTable(ScheduleTable):
    """The full learning rate after the warm-up."""

    kind: Literal["constant"] = "constant"
    """Which LR schedule."""


class LinearTable(ScheduleTable):
    """A straight line down to a share of the learning rate at the end of the run."""

    kind: Literal["linear"] = "linear"
    """Which LR schedule."""
    end_factor: Share = default_of(schedules.Linear, "end_factor")
    """Multiplier of the learning rate at the last update; with 0 that update changes nothing."""


class CosineTable(ScheduleTable):
    """Half a cosine down to a share of the learning rate at the end of the run."""

    kind: Literal["cosine"] = "cosine"
    """Which LR schedule."""
    end_factor: Share = default_of(schedules.Cosine, "end_factor")
    """Multiplier of the learning rate at the last update; with 0 that update changes nothing."""


class WsdTable(ScheduleTable):
    """Warm-up, stable, decay: the full learning rate until the decay at the end of the run."""

    kind: Literal["wsd"] = "wsd"
    """Which LR schedule."""
    decay_updates: Natural
    """Length of the decay at the end of the run, in updates."""
    shape: Literal["linear", "cosine", "sqrt"] = default_of(schedules.Wsd, "shape")
    """Shape of the decay."""
    end_factor: Share = default_of(schedules.Wsd, "end_factor")
    """Multiplier of the learning rate at the last update; with 0 that update changes nothing."""


class InverseSqrtTable(ScheduleTable):
    """Falls with one over the square root of the update number after the warm-up."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    """Which LR schedule."""


class PolynomialTable(ScheduleTable):
    """A power of the share of the run that is left."""

    kind: Literal["polynomial"] = "polynomial"
    """Which LR schedule."""
    power: Positive = default_of(schedules.Polynomial, "power")
    """The power; 1 is a straight line, more falls sooner."""
    end_factor: Share = default_of(schedules.Polynomial, "end_factor")
    """Multiplier of the learning rate at the last update; with 0 that update changes nothing."""


class CosineRestartsTable(ScheduleTable):
    """Half cosines one after the other, each begun at the top again."""

    kind: Literal["cosine_restarts"] = "cosine_restarts"
    """Which LR schedule."""
    period_updates: Count
    """Length of the first period, in updates."""
    period_factor: Annotated[float, Field(ge=1)] = default_of(schedules.CosineRestarts, "period_factor")
    """How many times longer each period is than the one before it."""
    shrink: Positive = default_of(schedules.CosineRestarts, "shrink")
    """What the learning rate of each period is multiplied by, compared with the one before it; at most 1."""
    end_factor: Share = default_of(schedules.CosineRestarts, "end_factor")
    """Which each period falls towards, as a share of where it began."""


class TriStageTable(ScheduleTable):
    """Warm-up, hold, exponential decay."""

    kind: Literal["tri_stage"] = "tri_stage"
    """Which LR schedule."""
    hold_updates: Natural = default_of(schedules.TriStage, "hold_updates")
    """Updates at the full learning rate after the warm-up."""
    decay_updates: Count | None = default_of(schedules.TriStage, "decay_updates")
    """Length of the decay, in updates; all that are left of the run by default."""
    start_factor: Share = default_of(schedules.TriStage, "start_factor")
    """Multiplier that the warm-up rises from."""
    end_factor: Share = default_of(schedules.TriStage, "end_factor")
    """Multiplier after the decay; above 0, which an exponential never reaches."""


class TriangularTable(Section):
    """A straight line up and one down again, over and over; it begins at the bottom."""

    kind: Literal["triangular"] = "triangular"
    """Which LR schedule."""
    period_updates: Count
    """Length of a cycle, in updates; the full learning rate is in its middle."""
    low_factor: Positive = default_of(schedules.Triangular, "low_factor")
    """Multiplier between cycles; below 1."""
    shrink: Positive = default_of(schedules.Triangular, "shrink")
    """What the height of each cycle is multiplied by, compared with the one before it; at most 1."""


class StepTable(ScheduleTable):
    """Multiplied by a factor after every so many updates or epochs."""

    kind: Literal["step"] = "step"
    """Which LR schedule."""
    every: Count
    """Updates, or epochs, between two steps."""
    factor: Positive = default_of(schedules.Step, "factor")
    """What each step multiplies by; at most 1."""
    min_factor: Share = default_of(schedules.Step, "min_factor")
    """The multiplier does not fall below this."""
    unit: Unit = default_of(schedules.Step, "unit")
    """What `every` counts: updates since the warm-up, or epochs."""


class MultiplicativeTable(ScheduleTable):
    """Multiplied by the next of some factors after every epoch, or update; the last one goes on."""

    kind: Literal["multiplicative"] = "multiplicative"
    """Which LR schedule."""
    factors: Annotated[tuple[Positive, ...], Field(strict=False)]
    """One factor for each epoch that has ended, such as [1.0, 1.0, 0.5]; one alone is for all."""
    min_factor: Share = default_of(schedules.Multiplicative, "min_factor")
    """The multiplier does not fall below this."""
    unit: Unit = default_of(schedules.Multiplicative, "unit")
    """What is counted: epochs, or updates since the warm-up."""


class ListedTable(ScheduleTable):
    """Learning rates, or multipliers, written down one by one with the update or epoch that each begins at."""

    kind: Literal["listed"] = "listed"
    """Which LR schedule."""
    factors: NumberedFactors | None = None
    """Pairs of a begin, from 1, and a multiplier: [[1, 1.0], [1000, 0.1]]. Give either this or `rates`."""
    rates: NumberedFactors | None = None
    """Pairs of a begin, from 1, and a learning rate; groups with a rate of their own keep their proportion."""
    unit: Unit = default_of(schedules.Listed, "unit")
    """What the begins are numbers of: updates or epochs."""


class PlateauTable(ScheduleTable):
    """Multiplied by a factor after every so many evaluations in a row without an improvement."""

    kind: Literal["plateau"] = "plateau"
    """Which LR schedule."""
    metric: str = default_of(schedules.Plateau, "metric")
    """A metric of an evaluation, such as `valid/loss`."""
    mode: Literal["min", "max"] = default_of(schedules.Plateau, "mode")
    """Whether smaller or larger is better."""
    factor: Annotated[float, Field(gt=0, lt=1)] = default_of(schedules.Plateau, "factor")
    """What the learning rate is multiplied by."""
    patience_evaluations: Count = default_of(schedules.Plateau, "patience_evaluations")
    """After this many evaluations in a row without an improvement."""
    min_delta: NonNegative = default_of(schedules.Plateau, "min_delta")
    """A change of at most this much is no improvement."""
    relative: bool = default_of(schedules.Plateau, "relative")
    """Whether `min_delta` is a share of the best value instead of a number in units of the metric."""
    cooldown_evaluations: Natural = default_of(schedules.Plateau, "cooldown_evaluations")
    """So many evaluations after each fall do not count."""
    min_factor: Share = default_of(schedules.Plateau, "min_factor")
    """The multiplier does not fall below this."""


def _constant_unless_said(value: object) -> object:
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": "constant"} | cast("dict[str, object]", value)
    return cast("object", value)


AnySchedule = (
    ConstantTable
    | LinearTable
    | CosineTable
    | CosineRestartsTable
    | WsdTable
    | InverseSqrtTable
    | PolynomialTable
    | TriStageTable
    | TriangularTable
    | StepTable
    | MultiplicativeTable
    | ListedTable
    | PlateauTable
)
LrScheduleTable = Annotated[Annotated[AnySchedule, Field(discriminator="kind")], BeforeValidator(_constant_unless_said)]
