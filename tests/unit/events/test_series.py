from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from evenstep.events.metrics.series import Record, Series


@given(arrivals=st.lists(st.lists(st.integers(0, 20), min_size=1).map(sorted)))
def test_values_are_ordered_by_update_and_then_by_arrival(arrivals: list[list[int]]) -> None:
    series = Series()
    updates = [update for together in arrivals for update in together]
    values = map(float, count())
    for together in arrivals:
        series.add([Record(update, "loss", value, 1.0) for update, value in zip(together, values, strict=False)])
    expected = sorted(((update, float(order)) for order, update in enumerate(updates)), key=lambda pair: pair[0])
    assert [(record.update, record.value) for record in series.records("x")] == expected


def test_only_the_newest_are_kept() -> None:
    series = Series((range(10), range(10), [1.0] * 10))
    series.keep(3)
    assert [record.update for record in series.records("x")] == [7, 8, 9]
