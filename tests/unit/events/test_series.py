from hypothesis import given
from hypothesis import strategies as st

from evenstep.events.series import Series


@given(updates=st.lists(st.integers(0, 20)), window=st.integers(1, 25))
def test_values_are_ordered_by_update_and_then_by_arrival(updates: list[int], window: int) -> None:
    series = Series()
    for order, update in enumerate(updates):
        series.add(update, float(order), 1.0)
    expected = sorted(((update, float(order)) for order, update in enumerate(updates)), key=lambda pair: pair[0])
    assert [(record.update, record.value) for record in series.records("x")] == expected
    if updates:
        inside = [pair for pair in expected if pair[0] > max(updates) - window]
        assert [(record.update, record.value) for record in series.records("x", series.start_of(window))] == inside


def test_only_the_newest_are_kept() -> None:
    series = Series(range(10), range(10), [1.0] * 10)
    series.keep(3)
    assert [record.update for record in series.records("x")] == [7, 8, 9]
