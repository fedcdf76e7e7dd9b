from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data import ReadOptions
from evenstep.data.batching import cut_by_tokens, fitting, shuffle_batches


def greedy_by_brute_force(lengths: list[int], max_tokens: int, max_samples: int | None) -> list[list[int]]:
    """Try every count for every batch, and keep the largest that is allowed."""
    batches: list[list[int]] = []
    rest = list(range(len(lengths)))
    while rest:
        fit = [
            count
            for count in range(1, len(rest) + 1)
            if count * max(lengths[place] for place in rest[:count]) <= max_tokens
            and (max_samples is None or count <= max_samples)
        ]
        count = max(fit)
        batches.append(rest[:count])
        rest = rest[count:]
    return batches


def batches_of(edges: list[int]) -> list[list[int]]:
    return [list(range(start, end)) for start, end in pairwise(edges)]


@pytest.mark.parametrize("max_tokens", [12, 20, 50, 1000])
@pytest.mark.parametrize("max_samples", [None, 1, 3, 8])
def test_a_cut_by_tokens_is_the_greedy_one(max_tokens: int, max_samples: int | None) -> None:
    random = np.random.default_rng(5)
    for num_samples in (1, 5, 8, 33):
        lengths = random.integers(1, 13, num_samples).tolist()
        edges = cut_by_tokens(lengths, max_tokens=max_tokens, max_samples=max_samples)
        assert batches_of(edges) == greedy_by_brute_force(lengths, max_tokens, max_samples)


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


def test_oversized_samples_can_be_left_out() -> None:
    fits = fitting(np.array([3, 11, 2, 10]), max_tokens=10, oversized="skip")
    assert fits.tolist() == [True, False, True, True]
