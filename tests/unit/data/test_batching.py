from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data import ReadOptions
from evenstep.data.batching import cut_by_tokens, fitting, shuffle_batches


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


def test_oversized_samples_can_be_left_out() -> None:
    fits = fitting(np.array([3, 11, 2, 10]), max_tokens=10, oversized="skip")
    assert fits.tolist() == [True, False, True, True]
