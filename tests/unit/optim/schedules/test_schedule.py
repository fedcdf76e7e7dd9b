"""The pieces that schedules are made of."""

import numpy as np
import pytest

from evenstep.optim.schedules import Cosine, Linear, PerGroup, decay_progress, warmup_factor


def test_the_warm_up_is_a_line_to_one_and_then_one():
    expected = np.interp(np.arange(1, 9), [0, 4], [0, 1]).tolist()
    assert [warmup_factor(update, 4) for update in range(1, 9)] == expected


def test_a_decay_is_a_line_from_zero_to_one():
    expected = np.interp(np.arange(1, 13), [3, 10], [0, 1])
    assert [decay_progress(update, 3, 10) for update in range(1, 13)] == pytest.approx(expected.tolist())


def test_a_decay_without_room_does_not_begin():
    assert decay_progress(5, 5, 5) == 0
    assert decay_progress(6, 5, 5) == 1


def test_a_schedule_of_a_group_is_found_by_the_groups_number() -> None:
    schedule = PerGroup({1: Linear(), "head": Cosine()})
    assert (schedule.of_group("1"), schedule.of_group("head")) == (Linear(), Cosine())
