"""Orders, cuts and shares of samples, and generators that data leaves as they were."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenstep.data import ReadOptions
from evenstep.data.batching import cut_by_tokens, shuffle_batches
from evenstep.data.order import Enciphered, order, order_of


def deviation(counts: NDArray[np.int64], expected: float, freedom: int) -> float:
    """χ² of counts that are expected to be equal, in standard deviations from its mean."""
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    return (chi_squared - freedom) / (2 * freedom) ** 0.5


def orders(num_samples: int, epochs: int) -> NDArray[np.int64]:
    """`[epochs, num_samples]`."""
    return np.stack([order(num_samples, seed=7, epoch=epoch) for epoch in range(epochs)])


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


@pytest.mark.parametrize("num_samples", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (13, 25, 64, 101))])
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


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=33),
    max_tokens=st.sampled_from([12, 20, 50, 1000]),
    max_samples=st.sampled_from([None, 1, 3, 8]),
)
def test_a_cut_by_tokens_is_the_greedy_one(lengths: list[int], max_tokens: int, max_samples: int | None) -> None:
    def fits(batch: list[int]) -> bool:
        return max(batch) * len(batch) <= max_tokens and len(batch) <= (max_samples or len(batch))

    edges = cut_by_tokens(lengths, max_tokens=max_tokens, max_samples=max_samples)
    assert (edges[0], edges[-1]) == (0, len(lengths))
    for begin, end in pairwise(edges):
        assert fits(lengths[begin:end])
        assert end == len(lengths) or not fits(lengths[begin : end + 1])


@given(sizes=st.lists(st.integers(1, 5), max_size=12), shuffle_key=st.integers(0, 2**63 - 1))
def test_shuffling_batches_leaves_each_batch_whole(sizes: list[int], shuffle_key: int) -> None:
    samples = np.arange(sum(sizes))
    edges = [0, *np.cumsum(sizes).tolist()]
    moved, moved_edges = shuffle_batches(samples, edges, shuffle_key=shuffle_key)
    before = [samples[start:end].tolist() for start, end in pairwise(edges)]
    after = [moved[start:end].tolist() for start, end in pairwise(moved_edges)]
    assert sorted(after) == sorted(before)
    assert moved_edges[-1] == len(samples)


@given(num_microbatches=st.integers(0, 50), ranks=st.integers(1, 20))
def test_shares_are_contiguous_and_balanced(num_microbatches: int, ranks: int) -> None:
    shares = [ReadOptions(seed=1, rank=rank, ranks=ranks).share(num_microbatches) for rank in range(ranks)]
    assert list(chain(*shares)) == list(range(num_microbatches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(num_microbatches=st.integers(0, 50), ranks=st.integers(1, 10), blocks=st.integers(1, 10))
def test_ranks_run_whole_blocks(num_microbatches: int, ranks: int, blocks: int) -> None:
    n = num_microbatches
    options = [ReadOptions(seed=1, rank=rank, ranks=ranks, blocks=blocks) for rank in range(ranks)]
    shares = [one.share(n) for one in options]
    assert list(chain(*shares)) == list(range(n))
    if n > blocks >= ranks:
        block_of = [((m + 1) * blocks - 1) // n for m in range(n)]
        held = [{block_of[m] for m in one} for one in shares]
        assert sum(map(len, held)) == blocks
        assert max(map(len, held)) - min(map(len, held)) <= 1
    else:
        assert shares == [replace(one, blocks=None).share(n) for one in options]
