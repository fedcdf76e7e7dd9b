from itertools import chain

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep.data.sampling import Sampling


def all_batches(sampling: Sampling, epoch: int, seed: int = 1) -> list[list[int]]:
    batches = sampling.epoch(epoch, seed=seed)
    return [batches.batch(number).tolist() for number in range(batches.num_batches)]


def test_curriculum_epochs_come_in_the_datasets_order_and_later_ones_are_shuffled() -> None:
    sampling = Sampling(num_samples=20, global_batch_size=7, curriculum_epochs=2)
    in_order = list(range(20))
    assert [list(chain(*all_batches(sampling, epoch))) == in_order for epoch in range(4)] == [
        True,
        True,
        False,
        False,
    ]


def test_batches_cut_by_tokens_do_not_come_from_short_to_long() -> None:
    lengths = np.arange(200) + 1
    sampling = Sampling(num_samples=200, global_batch_tokens=1000, lengths=lengths)
    longest = [lengths[batch].max() for batch in all_batches(sampling, 0)]
    assert longest != sorted(longest)


def test_sorting_by_length_wastes_little_of_the_budget() -> None:
    lengths = np.random.default_rng(3).integers(1, 200, 4000)

    def padding(window: int) -> float:
        sampling = Sampling(num_samples=4000, global_batch_tokens=4000, lengths=lengths, length_window=window)
        padded = sum(lengths[batch].max() * len(batch) for batch in all_batches(sampling, 0))
        return 1 - lengths.sum() / padded

    assert padding(4000) < 0.03
    assert padding(1) > 0.4


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    global_batch_tokens=st.integers(20, 90),
    micro_batch_tokens=st.integers(20, 40),
    micro_batch_size=st.none() | st.integers(1, 6),
    multiple=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_micro_batches_of_an_epoch_hold_every_sample_once_within_every_budget(
    lengths: list[int],
    global_batch_tokens: int,
    micro_batch_tokens: int,
    micro_batch_size: int | None,
    multiple: int,
    epoch: int,
) -> None:
    assume(micro_batch_tokens <= global_batch_tokens)
    sampling = Sampling(
        num_samples=len(lengths),
        global_batch_tokens=global_batch_tokens,
        micro_batch_tokens=micro_batch_tokens,
        micro_batch_size=micro_batch_size,
        batch_size_multiple=multiple,
        length_window=8,
        lengths=np.array(lengths),
    )
    batches = sampling.epoch(epoch, seed=1)
    seen: list[int] = []
    for number in range(batches.num_batches):
        samples = batches.batch(number)
        assert max(lengths[index] for index in samples) * len(samples) <= global_batch_tokens
        for microbatch in sampling.microbatches(samples):
            assert max(lengths[index] for index in microbatch) * len(microbatch) <= micro_batch_tokens
            assert micro_batch_size is None or len(microbatch) <= micro_batch_size
            seen += microbatch
    assert sorted(seen) == list(range(len(lengths)))


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    global_batch_tokens=st.integers(20, 90),
    micro_batch_tokens=st.integers(20, 40),
    micro_batch_size=st.none() | st.integers(1, 6),
)
def test_packed_batches_take_the_samples_in_their_order_while_the_sum_of_their_tokens_is_within_the_budget(
    lengths: list[int], global_batch_tokens: int, micro_batch_tokens: int, micro_batch_size: int | None
) -> None:
    assume(micro_batch_tokens <= global_batch_tokens)
    sampling = Sampling(
        num_samples=len(lengths),
        global_batch_tokens=global_batch_tokens,
        micro_batch_tokens=micro_batch_tokens,
        micro_batch_size=micro_batch_size,
        lengths=np.array(lengths),
        packed=True,
    )
    epoch, order = sampling.epoch(1, seed=1), Sampling(num_samples=len(lengths), global_batch_size=1).epoch(1, seed=1)
    batches = [epoch.batch(number).tolist() for number in range(epoch.num_batches)]
    assert list(chain(*batches)) == [int(order.batch(number)[0]) for number in range(len(lengths))]
    for batch, after in zip(batches, [*batches[1:], []], strict=True):
        total = sum(lengths[index] for index in batch)
        assert total <= global_batch_tokens
        assert not after or total + lengths[after[0]] > global_batch_tokens
        microbatches = sampling.microbatches(np.array(batch))
        assert sorted(chain(*microbatches)) == sorted(batch)
        for microbatch in microbatches:
            assert sum(lengths[index] for index in microbatch) <= micro_batch_tokens
            assert micro_batch_size is None or len(microbatch) <= micro_batch_size


def test_skipped_samples_do_not_change_the_order_of_the_others() -> None:
    lengths = [9 if index % 4 == 0 else 1 for index in range(30)]
    fitting = Sampling(num_samples=30, global_batch_size=5, micro_batch_tokens=5, lengths=lengths, oversized="skip")
    some = list(chain(*all_batches(fitting, 1)))
    every = list(chain(*all_batches(Sampling(num_samples=30, global_batch_size=5), 1)))
    assert some == [index for index in every if index % 4 != 0]
