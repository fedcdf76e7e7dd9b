"""Loss spikes: what is one, and how often it is said."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.events import Record
from evenstep.train.failures import LossSpikes

CALM = [1.0] * 8


def first(spikes: LossSpikes, history: list[float], *values: float) -> int | None:
    """The update of the first spike among `values`, which follow `history`."""
    records = [Record(len(history) + place, "train/loss", value, 1.0) for place, value in enumerate(values, start=1)]
    found = spikes.first(history, records)
    return None if found is None else found.update


@given(level=st.floats(0.1, 100), noise=st.lists(st.floats(-0.05, 0.05), min_size=32, max_size=32))
def test_noise_is_no_spike_and_ten_times_the_level_is_one(level: float, noise: list[float]) -> None:
    spikes, history = LossSpikes(window_updates=32), [level * (1 + part) for part in noise]
    assert first(spikes, history, level * 1.05) is None
    assert first(spikes, history, level, 10 * level) == 34


@pytest.mark.parametrize(
    ("window", "history", "values", "update"),
    [(8, CALM, [math.nan], 9), (8, CALM, [0.0], None), (128, CALM, [99.0], None), (8, [], [1.0, math.nan], 2)],
    ids=["not finite", "lower", "a mostly empty window", "a mean over nothing in the first updates"],
)
def test_a_spike_is_found(window: int, history: list[float], values: list[float], update: int | None) -> None:
    assert first(LossSpikes(window_updates=window), history, *values) == update


def test_a_spike_is_said_once_until_it_is_over() -> None:
    spikes = LossSpikes(window_updates=8)
    assert [first(spikes, CALM, value) is not None for value in (9.0, 9.0, 1.0, 9.0)] == [True, False, False, True]
