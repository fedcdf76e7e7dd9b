"""InverseSqrt against the formula of the Transformer paper, scaled to a peak of 1."""

import numpy as np
import pytest

from evenstep.optim.schedules import InverseSqrt


@pytest.mark.parametrize("warmup", [1, 2, 40])
def test_it_is_the_formula_of_the_paper_with_a_peak_of_one(warmup: int):
    update = np.arange(1.0, 201.0)
    expected = np.minimum(update**-0.5, update * warmup**-1.5) * warmup**0.5
    schedule = InverseSqrt(warmup_updates=warmup)
    assert [schedule(int(u), None) for u in update] == pytest.approx(expected.tolist(), rel=1e-12)


def test_without_a_warm_up_nothing_is_divided_by_zero():
    schedule = InverseSqrt(warmup_updates=0)
    assert [schedule(update, None) for update in (1, 4, 100)] == [1.0, 0.5, 0.1]


def test_the_length_of_the_run_changes_nothing():
    schedule = InverseSqrt(warmup_updates=5)
    assert [schedule(update, 10) for update in range(1, 11)] == [schedule(update, None) for update in range(1, 11)]
