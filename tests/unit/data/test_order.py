from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenstep.data.order import Enciphered, order, order_of
from evenstep.keys import mix


def enciphered(place: int, num_samples: int, order_key: int) -> int:
    """The sample at a place by the definition, one number at a time."""
    low = isqrt(num_samples - 1) + 1
    high = -(-num_samples // low)
    rounds = 0 if num_samples == 1 else 8 + 2 * min(8, 128 // num_samples)
    number = place
    while True:
        right, left = divmod(number, low)
        for turn in range(rounds):
            size = high if turn % 2 else low
            hashed = (mix(mix(order_key + turn) ^ right) >> 32) * size >> 32
            left, right = right, (left + hashed) % size
        number = right * low + left
        if number < num_samples:
            return number


def deviation(counts: NDArray[np.int64], expected: float, freedom: int) -> float:
    """χ² of counts that are expected to be equal, in standard deviations from its mean."""
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    return (chi_squared - freedom) / (2 * freedom) ** 0.5


def orders(num_samples: int, epochs: int) -> NDArray[np.int64]:
    """`[epochs, num_samples]`."""
    return np.stack([order(num_samples, seed=7, epoch=epoch) for epoch in range(epochs)])


@given(data=st.data(), num_samples=st.integers(1, 10**12), order_key=st.integers(0, 2**63 - 1))
def test_a_sample_is_its_place_enciphered_by_the_definition(
    data: st.DataObject, num_samples: int, order_key: int
) -> None:
    place = data.draw(st.integers(0, num_samples - 1))
    assert Enciphered(num_samples, order_key)(place, place + 1).tolist() == [enciphered(place, num_samples, order_key)]


@given(num_samples=st.integers(0, 3000), order_key=st.integers(0, 2**63 - 1))
def test_an_order_visits_every_sample_once(num_samples: int, order_key: int) -> None:
    visited = Enciphered(num_samples, order_key)(0, num_samples)
    assert np.array_equal(np.sort(visited), np.arange(num_samples))


@given(
    num_samples=st.sampled_from([5, 1000, 20_000, 10**8, 10**12]),
    stretches=st.lists(st.tuples(st.integers(0, 19_999), st.integers(0, 12_000)), min_size=1, max_size=6),
)
def test_any_stretch_of_an_order_is_that_of_the_whole_in_any_sequence(
    num_samples: int, stretches: list[tuple[int, int]]
) -> None:
    most = min(num_samples, 20_000)
    whole = order_of(num_samples, seed=5, epoch=2)(0, most)
    visited = order_of(num_samples, seed=5, epoch=2)
    for start, length in stretches:
        begin, end = min(start, most), min(start + length, most)
        assert np.array_equal(visited(begin, end), whole[begin:end])


def test_the_order_is_the_same_in_every_version() -> None:
    assert order(8, seed=42, epoch=3).tolist() == [7, 1, 0, 6, 4, 5, 3, 2]
    assert order_of(10**6, seed=42, epoch=3)(70_000, 70_003).tolist() == [453219, 765467, 47194]
    assert order_of(10**8, seed=42, epoch=3)(70_000, 70_003).tolist() == [58707821, 38274286, 25317345]


@pytest.mark.parametrize(
    "num_samples", [6, 13, 101, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 9, 25, 37, 64))]
)
def test_small_orders_over_epochs_have_even_places_neighbours_and_distances(num_samples: int) -> None:
    visited = orders(num_samples, epochs=1500)
    epochs, places = len(visited), np.arange(num_samples)
    at_places = np.bincount((places * num_samples + visited).ravel(), minlength=num_samples**2)
    assert abs(deviation(at_places, epochs / num_samples, (num_samples - 1) ** 2)) < 4
    first, second = visited[:, :-1], visited[:, 1:]
    pairs = np.bincount((first * num_samples + second).ravel(), minlength=num_samples**2).reshape(num_samples, -1)
    others = pairs[~np.eye(num_samples, dtype=bool)]
    assert abs(deviation(others, epochs / num_samples, num_samples * (num_samples - 1) - 1)) < 4
    distances = np.bincount(((second - first) % num_samples).ravel(), minlength=num_samples)[1:]
    assert abs(deviation(distances, distances.mean(), num_samples - 2)) < 4
