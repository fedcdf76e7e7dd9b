"""The LR schedules of the run file: one class per `kind`, with the fields of its namesake in `evenstep.optim`.

The default `kind` is constant. What each does to the learning rate is told there.
"""

from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field

from evenstep.config.section import Natural, Positive, Section, Share
from evenstep.optim import schedules
from evenstep.options import default_of


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


def _constant_unless_said(value: object) -> object:
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": "constant"} | cast("dict[str, object]", value)
    return cast("object", value)


AnySchedule = ConstantTable | LinearTable | CosineTable | WsdTable | InverseSqrtTable | PolynomialTable
LrScheduleTable = Annotated[Annotated[AnySchedule, Field(discriminator="kind")], BeforeValidator(_constant_unless_said)]
