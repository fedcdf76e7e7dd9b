"""Global batches whose size changes: cut against a plain loop over the whole run."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import MapData, Mixture
from evenstep.data import ReadOptions
from evenstep.data.sampling import BatchSizes
from evenstep.errors import ArgumentError, DataError
from refused import refused


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[int, int]]:
    begins = sorted({1, *draw(st.sets(st.integers(2, 40), max_size=4))})
    return [(begin, draw(st.integers(1, 12))) for begin in begins]


@settings(deadline=None, max_examples=60)
@given(pairs(), st.integers(1, 30), st.sampled_from(["updates", "epochs"]))
def test_every_epoch_is_cut_as_a_loop_over_the_whole_run_would(
    given: list[tuple[int, int]], num_samples: int, unit: str
) -> None:
    sizes = BatchSizes.of("global_batch_size", given, unit)
    number = 0
    for epoch in range(12):
        expected, place = [], 0
        while place < num_samples:
            expected.append(place)
            at = number if unit == "updates" else epoch
            place += [size for begin, size in given if begin <= at + 1][-1]
            number += 1
        begins = sizes.cut(num_samples, epoch)
        assert [begins[n] for n in range(len(begins))] == [*begins] == expected


def test_a_long_run_is_not_walked_through() -> None:
    sizes = BatchSizes(begins=(0, 10), sizes=(2, 4), unit="updates")
    assert len(sizes.cut(10**12, 10**9)) == 10**12 // 4


def test_budgets_of_tokens_change_by_epochs() -> None:
    lengths = [1 + n % 5 for n in range(40)]
    data = MapData(
        [*range(40)],
        global_batch_tokens=[(1, 10), (2, 40)],
        batch_size_unit="epochs",
        lengths=lengths,
        num_epochs=2,
    )
    for batch in data.batches(ReadOptions(seed=1)):
        budget = 10 if batch.position.epoch == 0 else 40
        taken = [lengths[sample] for sample in batch.microbatches[0].samples]
        assert max(taken) * len(taken) <= budget
    assert data.num_batches(1, seed=1) < data.num_batches(0, seed=1)


def test_a_longest_sample_must_fit_into_the_smallest_budget() -> None:
    more = {"batch_size_unit": "epochs", "lengths": [1, 2, 9]}
    with pytest.raises((ArgumentError, DataError)):
        MapData([0, 1, 2], global_batch_tokens=[(1, 8), (2, 16)], **more)
    skipping = MapData([0, 1, 2], global_batch_tokens=[(1, 8), (2, 16)], oversized="skip", **more)
    assert skipping.num_skipped == 1


def test_the_sizes_are_part_of_the_fingerprint() -> None:
    one = MapData([1, 2], global_batch_size=[(1, 1), (3, 2)]).fingerprint()
    assert json.loads(json.dumps(one)) == one
    assert one["global_batch_size"] == ["updates", [1, 1], [3, 2]]
    assert one != MapData([1, 2], global_batch_size=[(1, 1), (4, 2)]).fingerprint()
    assert MapData([1, 2], global_batch_size=1).fingerprint()["global_batch_size"] == 1


def test_a_task_of_a_mixture_counts_its_own_batches() -> None:
    data = Mixture(
        {
            "a": MapData([*range(6)], global_batch_size=[(1, 1), (3, 2)], shuffle=False),
            "b": MapData([*range(9)], global_batch_size=3, shuffle=False),
        },
        end="cycle",
    )
    given = [
        [len(one.samples) for one in batch.microbatches]
        for batch, _ in zip(data.batches(ReadOptions(seed=1)), range(5), strict=False)
    ]
    assert given == [[1, 3], [1, 3], [2, 3], [2, 3], [2, 3]]


@pytest.mark.parametrize("given", [[], [(2, 8)], [(1, 8), (1, 16)], [(1, 0)]])
def test_pairs_out_of_order_are_refused(given: Any) -> None:
    with refused(ArgumentError, "global_batch_size"):
        MapData([1, 2], global_batch_size=given)
