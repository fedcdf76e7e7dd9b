import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data.order import MOST_SORTED, Enciphered, order, order_of, scatter
from evenstep.errors import ArgumentError
from evenstep.keys import key, mix


@given(scatter_key=st.integers(0, 2**64 - 1), numbers=st.lists(st.integers(0, 2**62), max_size=20))
def test_scatter_is_the_scalar_mix_of_key_xor_number(scatter_key: int, numbers: list[int]) -> None:
    scattered = scatter(scatter_key, np.array(numbers, dtype=np.int64))
    assert scattered.tolist() == [mix(scatter_key ^ number) for number in numbers]


@given(num_samples=st.integers(0, 60), seed=st.integers(), epoch=st.integers(0, 1000))
def test_the_order_sorts_the_samples_by_their_scalar_hash(num_samples: int, seed: int, epoch: int) -> None:
    epoch_key = key(seed, "order", epoch)
    expected = sorted(range(num_samples), key=lambda index: mix(epoch_key ^ index))
    assert order(num_samples, seed=seed, epoch=epoch).tolist() == expected


def test_the_order_is_the_same_in_every_version() -> None:
    assert order(8, seed=42, epoch=3).tolist() == [6, 0, 5, 7, 2, 4, 1, 3]


def test_an_unshuffled_order_is_the_datasets_own() -> None:
    assert order(5, seed=1, epoch=9, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_seed_1_epoch_5_differs_from_seed_2_epoch_4() -> None:
    assert order(50, seed=1, epoch=5).tolist() != order(50, seed=2, epoch=4).tolist()


def test_a_million_samples_are_spread_evenly_over_the_order() -> None:
    places = np.argsort(order(1_000_000, seed=7, epoch=0))
    # The mean place of the first tenth of the samples, in standard deviations of the mean of 10⁵ uniform places.
    deviation = (places[:100_000].mean() - 499_999.5) / (1_000_000 / 12**0.5 / 100_000**0.5)
    assert abs(deviation) < 4


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ArgumentError, match="`epoch` must be at least 0, but is -1"):
        order(3, seed=1, epoch=-1)


@given(num_samples=st.integers(1, 3000), order_key=st.integers(0, 2**63 - 1))
def test_an_enciphered_order_visits_every_sample_once(num_samples: int, order_key: int) -> None:
    visited = Enciphered(num_samples, order_key)(0, num_samples)
    assert sorted(visited.tolist()) == list(range(num_samples))


@given(
    num_samples=st.sampled_from([1000, MOST_SORTED + 1, 10**8]),
    start=st.integers(0, 90_000),
    length=st.integers(0, 40_000),
)
def test_a_stretch_of_an_order_is_that_of_the_whole(num_samples: int, start: int, length: int) -> None:
    visited = order_of(num_samples, seed=5, epoch=2)
    stretch = visited(start, start + length)
    assert np.array_equal(stretch, order_of(num_samples, seed=5, epoch=2)(0, start + length)[start:])


def test_an_order_above_2_to_the_20_is_the_same_in_every_version() -> None:
    assert order_of(10**8, seed=42, epoch=3)(70_000, 70_003).tolist() == [58707821, 38274286, 25317345]


def test_a_large_order_is_spread_evenly_and_neighbours_are_independent() -> None:
    num_samples = 2**21
    visited = order(num_samples, seed=7, epoch=0)
    assert np.array_equal(np.bincount(visited, minlength=num_samples), np.ones(num_samples))
    expected = num_samples / 64**2
    for first, second in ((np.arange(num_samples), visited), (visited[:-1], visited[1:]), (visited[:-2], visited[2:])):
        counts = np.bincount(first // (num_samples // 64) * 64 + second // (num_samples // 64), minlength=64**2)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 64**2) < 6 * (2 * 64**2) ** 0.5


def test_large_orders_of_two_epochs_have_nothing_in_common() -> None:
    first, second = (order_of(10**8, seed=1, epoch=epoch)(0, 30_000) for epoch in range(2))
    assert len(np.intersect1d(first, second)) < 60  # 9 are expected
    assert np.count_nonzero(first == second) < 5
