import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import PlanError
from evenstep.pipeline import SCHEDULES
from evenstep.tools.planning.text import read_plans, write_plans, written_schedule


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 5))
def test_what_is_written_is_read_again(name: str, ranks: int, count: int) -> None:
    schedule = SCHEDULES[name]
    layout = schedule.layout(ranks)
    text = write_plans(schedule.plans(layout, range(count)))
    assert read_plans(text) == schedule.order(layout, range(count))


@pytest.mark.parametrize("text", ["0F0\n\n0F1 0X1", "F0", "0F0,0B0", "0f0"])
def test_a_word_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        read_plans(text)


def test_a_written_schedule_runs_any_microbatches_of_its_number() -> None:
    mine = written_schedule("mine", "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1")
    layout = mine.layout(2)
    assert layout.rank_of == (0, 1, 1, 0)
    assert str(mine.plans(layout, [5, 9])[0][0]) == "0F5"
    with pytest.raises(PlanError):
        mine.plans(layout, [0, 1, 2])
    with pytest.raises(PlanError):
        mine.layout(4)


@pytest.mark.parametrize("text", ["0F0 0B0 0R", "0F0 0B0\n0F1 0B1", "0F0 0B0\n2F0 2B0", ""])
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        written_schedule("mine", text)
