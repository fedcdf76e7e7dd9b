import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data.order import order, scatter
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
