"""The LR schedules of the run file: a table for each `kind`, made of its namesake in `evenstep.optim`.

Which keys must be given, and what the others are by default, is said there; here, what a run file may say of each. The
default `kind` is constant.
"""

from collections.abc import Mapping
from functools import reduce
from inspect import Parameter, signature
from operator import or_
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import BeforeValidator, Field, create_model

from evenstep.config.section import Count, Natural, NonNegative, NumberedFactors, Positive, Section, Share
from evenstep.optim.schedules import LR_SCHEDULES, DecayShape, Unit

_WARMUP = (Natural, "Length of the linear warm-up to the full learning rate, in updates; 0 and 1 both mean none.")
_END = (Share, "Multiplier of the learning rate at the last update; with 0 that update changes nothing.")
_MIN = (Share, "The smallest multiplier of the learning rate; it does not fall further.")
_OF_EACH = "The {} of each {} as a multiple of that of the one before; at most 1."
_MaybeCount: TypeAlias = Count | None
_Pairs: TypeAlias = NumberedFactors | None
_KEYS: dict[str, tuple[str, dict[str, tuple[Any, str]]]] = {
    "constant": ("The full learning rate after the warm-up.", {}),
    "linear": ("Falls linearly, to `end_factor` times the learning rate at the end of the run.", {"end_factor": _END}),
    "cosine": (
        "Falls along half a cosine, to `end_factor` times the learning rate at the end of the run.",
        {"end_factor": _END},
    ),
    "cosine_restarts": (
        "Falls along half a cosine again and again, each time from the top.",
        {
            "period_updates": (Count, "Length of the first period, in updates."),
            "period_factor": (
                Annotated[float, Field(ge=1)],
                "How many times longer each period is than the one before it.",
            ),
            "shrink": (Positive, _OF_EACH.format("learning rate", "period")),
            "end_factor": (Share, "Where each period ends, as a share of the learning rate that it began with."),
        },
    ),
    "wsd": (
        "Warm-up, stable, decay: the full learning rate until the decay at the end of the run.",
        {
            "decay_updates": (Natural, "Length of the decay at the end of the run, in updates."),
            "shape": (DecayShape, "Shape of the decay."),
            "end_factor": _END,
        },
    ),
    "inverse_sqrt": ("Falls with one over the square root of the update number after the warm-up.", {}),
    "polynomial": (
        "A power of the share of the run that is left.",
        {"power": (Positive, "The power; 1 is a straight line, more falls sooner."), "end_factor": _END},
    ),
    "tri_stage": (
        "Warm-up, hold, exponential decay.",
        {
            "hold_updates": (Natural, "Updates at the full learning rate after the warm-up."),
            "decay_updates": (
                _MaybeCount,
                "Length of the decay, in updates; all that are left of the run by default.",
            ),
            "start_factor": (Share, "Multiplier that the warm-up rises from."),
            "end_factor": (Share, "Multiplier after the decay; above 0, which an exponential never reaches."),
        },
    ),
    "triangular": (
        "A straight line up and one down again, over and over; it begins at the bottom.",
        {
            "period_updates": (Count, "Length of a cycle, in updates; the full learning rate is in its middle."),
            "low_factor": (Positive, "Multiplier between cycles; below 1."),
            "shrink": (Positive, _OF_EACH.format("height", "cycle")),
        },
    ),
    "step": (
        "Multiplied by a factor after every so many updates or epochs.",
        {
            "every": (Count, "Updates, or epochs, between two steps."),
            "factor": (Positive, "What each step multiplies the learning rate by; at most 1."),
            "min_factor": _MIN,
            "unit": (Unit, "What `every` counts: updates since the warm-up, or epochs."),
        },
    ),
    "multiplicative": (
        "After every epoch (or update), multiplied by the next of some factors; the last factor is used from then on.",
        {
            "factors": (
                Annotated[tuple[Positive, ...], Field(strict=False)],
                "One factor for each epoch that has ended, such as [1.0, 1.0, 0.5]; a single one is used every time.",
            ),
            "min_factor": _MIN,
            "unit": (Unit, "When to multiply: after every epoch, or after every update since the warm-up."),
        },
    ),
    "listed": (
        "Learning rates, or multipliers, each with the update or epoch from which it applies.",
        {
            "factors": (
                _Pairs,
                "Pairs of a start, from 1, and a multiplier: [[1, 1.0], [1000, 0.1]]. Give either this or `rates`.",
            ),
            "rates": (
                _Pairs,
                "Pairs of a start, from 1, and a learning rate; groups with a rate of their own keep their proportion.",
            ),
            "unit": (Unit, "What the starts count: updates or epochs."),
        },
    ),
    "plateau": (
        "Multiplied by a factor after every so many evaluations in a row without an improvement.",
        {
            "metric": (str, "A metric of an evaluation, such as `valid/loss`."),
            "mode": (Literal["min", "max"], "`min` if smaller is better, `max` if larger is better."),
            "factor": (Annotated[float, Field(gt=0, lt=1)], "What the learning rate is multiplied by."),
            "patience_evaluations": (Count, "How many evaluations in a row without an improvement it takes."),
            "min_delta": (NonNegative, "A change of at most this much does not count as an improvement."),
            "relative": (
                bool,
                "`min_delta` is a share of the best value instead of a number in the metric's own unit.",
            ),
            "cooldown_evaluations": (Natural, "How many evaluations after each reduction do not count."),
            "min_factor": _MIN,
        },
    ),
}


class ScheduleTable(Section):
    """An LR schedule, of any kind."""

    if TYPE_CHECKING:
        kind: str = "constant"


def _table(kind: str, about: str, keys: Mapping[str, tuple[Any, str]]) -> type[ScheduleTable]:
    """The table of a kind of LR schedule.

    A key has the default of its namesake's argument; where that has none it is None, or else the key must be given.
    """
    namesake = LR_SCHEDULES[kind]
    arguments = signature(namesake).parameters
    warmup = {"warmup_updates": _WARMUP} if "warmup_updates" in arguments else {}
    fields: dict[str, Any] = {}
    for name, (may_be, says) in {**warmup, "kind": (Literal[kind], "Which LR schedule."), **keys}.items():
        default = kind if name == "kind" else arguments[name].default if name in arguments else Parameter.empty
        if default is Parameter.empty:
            default = None if NoneType in get_args(may_be) else ...
        fields[name] = (may_be, Field(default, description=says))
    named = f"{kind.title().replace('_', '')}Table"
    # descriptions are given; to look for them in the source, pydantic would go through all frames and all modules
    written = {"use_attribute_docstrings": False}
    return create_model(
        named, __base__=ScheduleTable, __module__=__name__, __doc__=about, __cls_kwargs__=written, **fields
    )


TABLES = {kind: _table(kind, about, keys) for kind, (about, keys) in _KEYS.items()}


def _constant_unless_said(value: object) -> object:
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": "constant"} | cast("dict[str, object]", value)
    return cast("object", value)


if TYPE_CHECKING:
    AnySchedule = ScheduleTable
else:
    AnySchedule = reduce(or_, TABLES.values())
LrScheduleTable = Annotated[Annotated[AnySchedule, Field(discriminator="kind")], BeforeValidator(_constant_unless_said)]
