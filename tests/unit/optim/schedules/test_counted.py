"""Step, Multiplicative and Listed against PyTorch's StepLR, MultiplicativeLR, ExponentialLR and MultiStepLR."""

import pytest
from torch.optim.lr_scheduler import ExponentialLR, MultiplicativeLR, MultiStepLR, StepLR

from evenstep.errors import ArgumentError
from evenstep.optim.schedules import CountedSchedule, Listed, Multiplicative, Step

GIVEN = (0.5, 1.5, 0.9)


@pytest.mark.parametrize("unit", ["updates", "epochs"])
@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (lambda optimizer: StepLR(optimizer, step_size=4, gamma=0.3), Step(every=4, factor=0.3)),
        (lambda optimizer: ExponentialLR(optimizer, gamma=0.8), Multiplicative(factors=(0.8,))),
        (
            lambda optimizer: MultiplicativeLR(optimizer, lambda step: GIVEN[min(step - 1, 2)]),
            Multiplicative(factors=GIVEN),
        ),
        (
            lambda optimizer: MultiStepLR(optimizer, milestones=[3, 7], gamma=0.5),
            Listed(factors=((1, 1.0), (4, 0.5), (8, 0.25))),
        ),
    ],
    ids=["step", "exponential", "multiplicative", "multi step"],
)
def test_it_is_that_of_pytorch_by_update_and_by_epoch(torch_factors, make, schedule, unit: str) -> None:
    schedule = type(schedule)(**{**{name: getattr(schedule, name) for name in fields_of(schedule)}, "unit": unit})
    expected = torch_factors(make, 20)
    if unit == "updates":
        given = [schedule(update, 20) for update in range(1, 21)]
        assert not schedule.needs
    else:  # whatever their numbers
        given = [schedule.in_epoch(1000 - 3 * epoch, epoch, None) for epoch in range(20)]
        assert [*schedule.needs] == ["epochs"]
    assert given == pytest.approx(expected, rel=1e-12)


def fields_of(schedule: CountedSchedule) -> list[str]:
    return [*schedule.__dataclass_fields__]


def test_a_step_counts_from_the_end_of_the_warm_up_and_stops_falling() -> None:
    schedule = Step(every=2, factor=0.5, min_factor=0.2, warmup_updates=4)
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]
    assert [schedule(update, None) for update in range(1, 12)] == expected


def test_a_list_is_numbered_by_the_run_and_warms_up_too() -> None:
    schedule = Listed(factors=((1, 1.0), (3, 2.0), (6, 0.5)), warmup_updates=4)
    assert [schedule(update, None) for update in range(1, 8)] == [0.25, 0.5, 1.5, 2.0, 2.0, 0.5, 0.5]


def test_rates_become_factors_of_the_optimizers_rate() -> None:
    schedule = Listed.of_rates([(1, 3e-4), (100, 1e-4)], lr=3e-4, unit="epochs")
    assert schedule.in_epoch(5, 98, None) == 1.0
    assert 3e-4 * schedule.in_epoch(5, 99, None) == pytest.approx(1e-4, rel=1e-15)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Step(every=0), "`every` must be a whole number"),
        (lambda: Step(every=2, factor=1.5), "`factor` must be above 0 and at most 1"),
        (lambda: Step(every=2, unit="steps"), "`unit` must be one of updates, epochs"),
        (lambda: Step(every=2, min_factor=1.0), "`min_factor` must be at least 0 and below 1"),
        (lambda: Multiplicative(factors=()), "`factors` must hold at least one number"),
        (lambda: Multiplicative(factors=(0.0,)), "number 1 of them is 0.0"),
        (lambda: Listed(factors=()), "`factors` must hold at least one pair"),
        (lambda: Listed(factors=((2, 1.0),)), "begin with 1, the first, but one begins at 2"),
        (lambda: Listed(factors=((1, 1.0), (5, 0.5), (5, 0.1))), "come after 5, but one begins at 5"),
        (lambda: Listed(factors=((1, 1.0, 2.0),)), "pairs of a number of updates and a factor"),
        (lambda: Listed(factors=((1, -1.0),)), "above 0 and finite"),
        (lambda: Listed.of_rates(((1, 0.0),), lr=0.1), "`rates` must be above 0 and finite"),
        (lambda: Listed(factors=((1, 1.0), (50, 0.5))).check(20), "one begins at 50, which would have no effect"),
    ],
)
def test_what_cannot_be_is_refused(make, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()
