"""Global batches of map-style datasets: sampling, cuts, augmentation, fingerprints."""

import json
import random
from collections import Counter, OrderedDict, defaultdict
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import kit
from evenstep.data import GlobalBatch, MapData, Position, ReadOptions, StreamData, data_of
from evenstep.data.batching import cut_by_pairs
from evenstep.data.dataset import draws_nothing, rows_of
from evenstep.data.split import samples_in
from evenstep.data.tree import pin


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Each sample is its number and what the three generators draw for it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.randn()), random.random()


class NoisyMany(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [self[index] for index in indices]


class Remembering(Dataset[tuple[int, int]]):
    """Each sample is its number and the epoch that the dataset was last told."""

    fingerprint: object = "remembering"

    def __init__(self) -> None:
        self.told: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.told[-1]

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


def taken(data: MapData, count: int = 0, *, epochs: int = 1, **read: Any) -> list[GlobalBatch]:
    count = count or sum(data.num_batches(epoch, seed=1) for epoch in range(epochs))
    return list(islice(data.batches(ReadOptions(**{"seed": 1, **read})), count))


def samples(batch: GlobalBatch) -> list[list[int]]:
    return [list(one.samples) for one in batch.microbatches]


def updates(data: MapData, count: int = 0, **read: Any) -> list[list[int]]:
    return [list(chain(*samples(batch))) for batch in taken(data, count, **read)]


SIZES = st.sampled_from([(1, 1), (4, 3), (6, None), (12, 5)])


@settings(max_examples=25)
@given(num_samples=st.integers(1, 30), sizes=SIZES, ranks=st.integers(1, 5), shuffle=st.booleans())
def test_ranks_together_see_each_sample_of_an_epoch_once_as_one_rank_does(
    num_samples: int, sizes: tuple[int, int | None], ranks: int, shuffle: bool
) -> None:
    options: Any = {"global_batch_size": sizes[0], "micro_batch_size": sizes[1], "shuffle": shuffle}
    data = MapData(range(num_samples), **options)
    alone = taken(data, epochs=2)
    of_ranks = [taken(data, epochs=2, rank=rank, ranks=ranks) for rank in range(ranks)]
    for batch, *theirs in zip(alone, *of_ranks, strict=True):
        assert list(chain(*(chain(*samples(one)) for one in theirs))) == list(chain(*samples(batch)))
        if sizes[1] is not None:
            assert list(chain(*(samples(one) for one in theirs))) == samples(batch)
        elif batch.num_samples >= ranks:
            assert all(len(one.microbatches) == 1 for one in theirs)
    assert sorted(chain(*updates(data, epochs=2))) == sorted([*range(num_samples)] * 2)


@settings(max_examples=20)
@given(num_samples=st.integers(1, 20), size=st.integers(1, 8), skip=st.integers(0, 30))
def test_a_resume_at_every_position_gives_the_rest_of_the_sequence(num_samples: int, size: int, skip: int) -> None:
    data = MapData(range(num_samples), global_batch_size=size, collate=list)
    whole = taken(data, skip + 12)
    start = whole[skip - 1].following if skip else Position()
    assert taken(data, 12, start=start) == whole[skip:]


def test_augmentation_does_not_depend_on_the_cut_or_the_ranks() -> None:
    def values(micro_batch_size: int | None, rank: int = 0, ranks: int = 1) -> list[Any]:
        data = MapData(Noisy(12), global_batch_size=6, micro_batch_size=micro_batch_size, collate=list)
        return [
            sample
            for batch in taken(data, 4, rank=rank, ranks=ranks)
            for one in batch.microbatches
            for sample in one.data
        ]

    expected = values(None)
    assert values(1) == values(4) == expected
    for micro in (2, None):
        assert sorted(values(micro, 0, 2) + values(micro, 1, 2)) == sorted(expected)
    assert len({sample[1:] for sample in expected}) == 24


@pytest.mark.parametrize("dataset", [Noisy(8), NoisyMany(8)])
def test_augmentation_is_keyed_and_the_users_generators_are_left_as_they_were(dataset: Noisy) -> None:
    data = MapData(dataset, global_batch_size=4, micro_batch_size=2, collate=list, shuffle=False)
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    first, second = (batch.microbatches[0].data for batch in taken(data, 2))
    assert taken(data, 1, start=Position(batch=1))[0].microbatches[0].data == second
    others = [taken(data, 1, start=Position(epoch=1))[0], taken(data, 1, seed=2)[0]]
    drawn = {
        repr([one[1:] for one in values]) for values in (first, second, *(one.microbatches[0].data for one in others))
    }
    assert len(drawn) == 4
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1][1])
    assert random.getstate() == states[2]


def test_the_dataset_is_told_of_each_epoch_once_and_of_the_one_it_resumes_in() -> None:
    dataset = Remembering()
    data = MapData(dataset, global_batch_size=2, collate=list)
    for batch in taken(data, 7, start=Position(epoch=3, batch=1)):
        assert all(epoch == batch.position.epoch for _, epoch in batch.microbatches[0].data)
    assert dataset.told == [3, 4, 5]


def by_tokens(lengths: Any, **options: Any) -> list[list[list[int]]]:
    """Micro-batches of the global batches of an epoch."""
    data = MapData(range(len(lengths)), lengths=np.array(lengths), **options)
    return [samples(batch) for batch in taken(data)]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    tokens=st.tuples(st.integers(40, 90), st.integers(20, 40)),
    micro_batch_size=st.none() | st.integers(1, 6),
    packed=st.booleans(),
)
def test_batches_hold_every_sample_once_within_every_budget(
    lengths: list[int], tokens: tuple[int, int], micro_batch_size: int | None, packed: bool
) -> None:
    def size(batch: list[int]) -> int:
        taken = [lengths[index] for index in batch]
        return sum(taken) if packed else max(taken) * len(taken)

    batches = by_tokens(
        lengths,
        global_batch_tokens=tokens[0],
        micro_batch_tokens=tokens[1],
        micro_batch_size=micro_batch_size,
        packed=packed,
    )
    assert sorted(chain(*chain(*batches))) == list(range(len(lengths)))
    whole = [list(chain(*one)) for one in batches]
    assert all(size(one) <= tokens[0] for one in whole)
    assert all(size(one) <= tokens[1] and len(one) <= (micro_batch_size or 40) for one in chain(*batches))
    if packed:  # each as full as can be
        order = updates(MapData(range(len(lengths)), global_batch_size=len(lengths)))[0]
        ends = [order[sum(map(len, whole[: number + 1]))] for number in range(len(whole) - 1)]
        assert all(size([*one, end]) > tokens[0] for one, end in zip(whole, ends, strict=False))


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[int, int]]:
    begins = sorted({1, *draw(st.sets(st.integers(2, 40), max_size=4))})
    return [(begin, draw(st.integers(1, 12))) for begin in begins]


@settings(max_examples=30)
@given(pairs(), st.integers(1, 30))
def test_every_epoch_is_cut_as_a_loop_over_the_whole_run_would(given: list[tuple[int, int]], num_samples: int) -> None:
    number = 0
    for epoch in range(12):
        expected = [0]
        while expected[-1] < num_samples:
            expected.append(expected[-1] + [size for begin, size in given if begin <= number + 1][-1])
            number += 1
        assert list(cut_by_pairs(given, num_samples, epoch)) == expected


def test_the_fingerprint_changes_with_all_that_changes_the_samples_of_an_update() -> None:
    base = {"global_batch_tokens": 8, "lengths": [1, 2, 3, 4]}
    variants: list[dict[str, Any]] = [
        base,
        base | {"lengths": [1, 2, 4, 3]},
        base | {"global_batch_tokens": 9},
        base | {"shuffle": False},
        base | {"packed": True},
        {"global_batch_size": 2},
        {"global_batch_size": [(1, 1), (3, 2)]},
        {"global_batch_size": 2, "sampling": [1, 2, 3, 4]},
    ]
    prints = [MapData(range(4), **variant).fingerprint() for variant in variants]
    prints.append(MapData(Subset(range(4), [0, 1, 2, 3]), **base).fingerprint())
    assert all(json.loads(json.dumps(one)) == one for one in prints)
    assert len({*map(repr, prints)}) == len(prints)
    cuts = [{}, {"micro_batch_tokens": 4}, {"micro_batch_size": 1}]
    prints = [MapData(range(4), **base, **cut).fingerprint() for cut in cuts]
    assert len({repr(one.pop("cut")) for one in prints}) == 3
    assert prints[0] == prints[1] == prints[2]


def test_rows_are_those_of_the_default_collate_function() -> None:
    whole = TensorDataset(torch.randn(9, 2, 3), torch.arange(9), torch.arange(9) > 4)
    for dataset in (whole, Subset(whole, [8, 1, 5, 5, -2]), Subset(Subset(whole, [7, 8, 1, 3, 4]), [4, 0, 2, 1, 3])):
        rows = rows_of(dataset)
        assert rows is not None
        expected = default_collate([dataset[index] for index in [3, 0, 2]])
        for one, other in zip(rows([3, 0, 2]), expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)

    class Own(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return (torch.rand(()),)

    assert rows_of(Own(torch.zeros(3))) is None
    assert not draws_nothing(Own(torch.zeros(3)))


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    data = MapData(range(5), global_batch_size=5, sampling=[1.0, 0.0, 2.0, 5.0, 0.0])
    counts = Counter(chain(*updates(data, 2000)))
    assert set(counts) == {0, 2, 3}
    assert counts[0] / 10_000 == pytest.approx(1 / 8, abs=0.01)
    assert counts[3] / 10_000 == pytest.approx(5 / 8, abs=0.01)


@pytest.mark.parametrize("replacement", [True, False])
def test_draws_resume_anywhere_and_are_divided_among_ranks(replacement: bool) -> None:
    weights = WeightedRandomSampler([1.0, 2.0, 3.0, 4.0] * 5, 12, replacement=replacement)
    data = MapData(range(20), global_batch_size=4, sampling=weights)
    whole = updates(data, 9)
    assert updates(data, 5, start=Position(epoch=1, batch=1)) == whole[4:]
    ranks = [updates(data, 9, rank=rank, ranks=2) for rank in range(2)]
    assert [one + other for one, other in zip(*ranks, strict=True)] == whole
    assert whole[:3] != whole[3:6]
    if not replacement:
        assert len(set(chain(*whole[:3]))) == 12


@pytest.mark.parametrize(
    "sampler", [WeightedRandomSampler([0.0, 1.0, 1.0], 8), RandomSampler(range(3), replacement=True, num_samples=8)]
)
def test_a_loader_that_draws_is_taken_over(sampler: Any) -> None:
    data = data_of(DataLoader([0.0, 1.0, 2.0], batch_size=4, sampler=sampler, drop_last=True), "data")
    assert data.num_batches(0, seed=1) == 2
    found = set(chain(*updates(data, 10)))
    assert found == ({1, 2} if isinstance(sampler, WeightedRandomSampler) else {0, 1, 2})


class Part:
    """Stands for anything that can be pinned, without an accelerator."""

    def pin_memory(self) -> str:
        return "pinned"


def test_every_part_is_pinned_and_every_type_kept() -> None:
    batch = defaultdict(list, inputs=(Part(), [3, "text"]), more=OrderedDict(x=Part()), none=None)
    assert pin(batch) == {"inputs": ("pinned", [3, "text"]), "more": {"x": "pinned"}, "none": None}
    assert (type(pin(batch)), type(pin(batch)["more"])) == (defaultdict, OrderedDict)


def sample(number: int) -> tuple[Tensor, Tensor] | None:
    is_lost = number % 3 == 1 or 8 <= number < 12
    return None if is_lost else (torch.full((4,), number / 32), torch.tensor(number / 16))


def without_lost(samples: list[Any]) -> Any:
    good = [one for one in samples if one is not None]
    return default_collate(good) if good else (torch.zeros(0, 4), torch.zeros(0))


def model() -> nn.Linear:
    return kit.filled(nn.Linear(4, 1))


def plain_loop() -> nn.Linear:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for begin in range(0, 32, 8):
        x, y = without_lost([sample(number) for number in range(begin, begin + 8)])
        optimizer.zero_grad()
        (((trained(x).squeeze(-1) - y) ** 2).sum() / len(x)).backward()
        optimizer.step()
    return trained


@pytest.mark.parametrize(("kind", "micro_batch_size"), [("map", 4), ("stream", 2)])
def test_a_collate_function_that_drops_samples_trains_as_the_good_samples(kind: str, micro_batch_size: int) -> None:
    sizes: Any = {"global_batch_size": 8, "micro_batch_size": micro_batch_size, "collate": without_lost}
    samples = [sample(number) for number in range(32)]
    data = MapData(samples, shuffle=False, **sizes) if kind == "map" else StreamData(samples, **sizes)
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    kit.trainer_of(trained, optimizer=optimizer, data=data, updates=4).train()
    assert torch.allclose(trained.weight, plain_loop().weight, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(8, 3), 8),
        (torch.tensor(5.0), 1),
        ((torch.zeros(8, 3), torch.zeros(8)), 8),
        ({"inputs": torch.zeros(8, 3), "mask": torch.zeros(8, 1)}, 8),
        (({"inputs": torch.zeros(8, 3)}, torch.zeros(8)), 8),
        (((torch.zeros(3, 5, 5), torch.zeros(3, 9, 4)), ({"boxes": 1}, {"boxes": 2})), 2),
        (["a", "b", "c"], 3),
        ({}, 0),
    ],
)
def test_samples_of_a_ready_made_batch(batch: object, expected: int) -> None:
    assert samples_in(batch) == expected
