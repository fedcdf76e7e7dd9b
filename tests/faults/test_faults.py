"""Every fault of the battery comes out as it must."""

import pytest
from battery import Case, limited
from lost import CASES

PARAMETERS = [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in CASES]


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_fault_comes_out_as_it_must(case: Case) -> None:
    limited(case.check, 600 if case.slow else 120)


def test_the_battery_holds_sixty_faults_of_different_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
