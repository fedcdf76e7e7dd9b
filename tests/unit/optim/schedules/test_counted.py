"""Step, Multiplicative and Listed against PyTorch's StepLR, MultiplicativeLR, ExponentialLR and MultiStepLR."""

import pytest
from torch.optim.lr_scheduler import ExponentialLR, MultiplicativeLR, MultiStepLR, StepLR

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
