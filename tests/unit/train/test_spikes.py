import math

from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ArgumentError
from evenstep.events import Record
from evenstep.train import LossSpikes
from refused import refused


def records(values: list[float], start: int = 1) -> list[Record]:
    return [Record(start + place, "train/loss", value, 1.0) for place, value in enumerate(values)]


@given(level=st.floats(0.1, 100), noise=st.lists(st.floats(-0.05, 0.05), min_size=32, max_size=32))
def test_noise_is_no_spike_and_ten_times_the_level_is_one(level: float, noise: list[float]) -> None:
    spikes = LossSpikes(window_updates=32)
    history = [level * (1 + part) for part in noise]
    assert spikes.first(history, records([level * 1.05], 33)) is None
    found = spikes.first(history, records([level, 10 * level], 33))
    assert found is not None
    assert found.update == 34


def test_a_spike_is_said_once_until_it_is_over() -> None:
    spikes = LossSpikes(window_updates=8)
    history = [1.0] * 8
    assert spikes.first(history, records([9.0], 9)) is not None
    assert spikes.first(history, records([9.0], 10)) is None
    assert spikes.first(history, records([1.0], 11)) is None
    assert spikes.first(history, records([9.0], 12)) is not None


def test_a_loss_that_is_not_finite_is_one_and_a_lower_one_is_none() -> None:
    history = [1.0] * 8
    assert LossSpikes(window_updates=8).first(history, records([math.nan], 9)) is not None
    assert LossSpikes(window_updates=8).first(history, records([0.0], 9)) is None


def test_a_mean_over_nothing_is_said_in_the_first_updates_and_only_once() -> None:
    spikes = LossSpikes(window_updates=8)
    found = spikes.first([], records([1.0, math.nan, 1.0, math.nan]))
    assert found is not None
    assert found.update == 2
    assert "although its gradient was finite" in found.message
    assert "`Loss.of_mean(mean, count)`" in found.message
    assert spikes.first([1.0, math.nan, 1.0, math.nan], records([1.0, math.nan], 5)) is None


def test_a_mostly_empty_window_finds_no_spikes() -> None:
    assert LossSpikes(window_updates=128).first([1.0] * 20, records([99.0], 21)) is None


def test_a_window_that_is_too_short_is_refused() -> None:
    with refused(ArgumentError, "window_updates"):
        LossSpikes(window_updates=4)
