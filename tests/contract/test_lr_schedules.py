"""What every LR schedule must be, whichever it is: add yours to `schedules()`."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.errors import ArgumentError
from evenstep.optim.schedules import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    Listed,
    LrSchedule,
    Multiplicative,
    Polynomial,
    Step,
    TriStage,
    Wsd,
)
from refused import refused

ENDING = [TriStage(), Linear(), Cosine(), Polynomial(), Wsd(decay_updates=1)]


@st.composite
def schedules(draw: st.DrawFn, *, min_updates: int = 1) -> tuple[LrSchedule, int]:
    """A schedule of any kind and a run that it fits."""
    updates = draw(st.integers(min_updates, 60))
    every, shrink = draw(st.integers(1, 20)), draw(st.sampled_from([0.3, 0.9]))
    warmup = draw(st.integers(0, updates))
    end_factor = draw(st.sampled_from([0.0, 0.05, 1 / 3, 1.0]))
    decay = draw(st.integers(0, updates - max(warmup, 1)))
    schedule = draw(
        st.sampled_from(
            [
                Constant(warmup_updates=warmup),
                InverseSqrt(warmup_updates=warmup),
                Linear(warmup_updates=warmup, end_factor=end_factor),
                Cosine(warmup_updates=warmup, end_factor=end_factor),
                Polynomial(warmup_updates=warmup, end_factor=end_factor, power=draw(st.sampled_from([0.5, 1.0, 3.0]))),
                *(
                    Wsd(warmup_updates=warmup, decay_updates=decay, shape=shape, end_factor=end_factor)
                    for shape in ("linear", "cosine", "sqrt")
                ),
                TriStage(warmup_updates=warmup, decay_updates=decay or None, end_factor=end_factor or 0.01),
                Step(warmup_updates=warmup, every=every, factor=shrink, min_factor=end_factor % 1),
                Multiplicative(warmup_updates=warmup, factors=(1.0, shrink), unit="updates"),
                Listed(
                    warmup_updates=warmup, factors=((1, 1.0), *(((updates, shrink),) if updates > warmup + 1 else ()))
                ),
            ]
        )
    )
    return schedule, updates


def factors(schedule: LrSchedule, updates: int) -> list[float]:
    return [schedule(update, updates) for update in range(1, updates + 1)]


def peak_update(schedule: LrSchedule) -> int:
    return max(schedule.warmup_updates, 1)


@settings(deadline=None)
@given(schedules())
def test_every_multiplier_is_finite_and_at_most_one(case: tuple[LrSchedule, int]):
    assert all(math.isfinite(factor) and 0 <= factor <= 1 for factor in factors(*case))


@settings(deadline=None)
@given(schedules())
def test_only_a_last_update_with_end_factor_zero_has_no_lr(case: tuple[LrSchedule, int]):
    *before, last = factors(*case)
    assert all(factor > 0 for factor in before)
    assert last > 0 or (case[0].end_factor == 0 and before)


@settings(deadline=None)
@given(schedules())
def test_the_warm_up_rises_in_equal_steps_to_exactly_one(case: tuple[LrSchedule, int]):
    schedule, updates = case
    warmup = schedule.warmup_updates
    assert factors(schedule, updates)[:warmup] == [update / warmup for update in range(1, warmup + 1)]
    assert schedule(peak_update(schedule), updates) == 1


@settings(deadline=None)
@given(schedules())
def test_after_the_warm_up_it_never_rises(case: tuple[LrSchedule, int]):
    after = factors(*case)[peak_update(case[0]) - 1 :]
    assert all(later <= earlier for earlier, later in pairwise(after))


@pytest.mark.parametrize("schedule", ENDING, ids=lambda schedule: type(schedule).__name__)
def test_a_schedule_with_an_end_asks_for_the_length(schedule: LrSchedule):
    with refused(ArgumentError, "updates"):
        schedule.check(None)


@pytest.mark.parametrize("kind", [Constant, InverseSqrt, Linear, Cosine, Polynomial, Wsd])
def test_a_warm_up_longer_than_the_run_is_refused(kind: type[LrSchedule]):
    schedule = kind(warmup_updates=200, **({"decay_updates": 1} if kind is Wsd else {}))
    with refused(ArgumentError, "warmup_updates"):
        schedule.check(100)


@pytest.mark.parametrize("kind", [Linear, Cosine, Polynomial])
def test_the_last_update_has_exactly_the_end_factor(kind: type[LrSchedule]):
    for end_factor in (0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0):
        for updates in (2, 3, 7, 100, 12_345):
            assert kind(warmup_updates=1, end_factor=end_factor)(updates, updates) == end_factor
