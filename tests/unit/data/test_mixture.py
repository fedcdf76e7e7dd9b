"""Mixtures: pure, resumable, the same for any number of ranks, and with every end-of-data policy."""

import json
from itertools import islice
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.data import AllTasks, Data, MapData, Mixing, Mixture, Position, ReadOptions, RoundRobin, Sampled

SIZES = {"a": 7, "b": 3, "c": 5}


def tasks(batch: int = 2, **sizes: int) -> dict[str, Data]:
    return {
        name: MapData([100 * place + n for n in range(count)], global_batch_size=batch, micro_batch_size=1)
        for place, (name, count) in enumerate((sizes or SIZES).items())
    }


def shown(batch: Any) -> tuple[Any, ...]:
    """Everything of a global batch but how long it took."""
    return (
        batch.position,
        batch.following,
        batch.num_microbatches,
        batch.num_samples,
        batch.ends_epoch,
        [(part.task, part.num_microbatches, part.num_samples) for part in batch.parts],
        [(one.index, one.task, one.data.tolist(), one.num_samples) for one in batch.microbatches],
    )


def taken(mixture: Mixture, count: int, start: Position | None = None, **more: Any) -> list[Any]:
    return [
        shown(batch) for batch in islice(mixture.batches(ReadOptions(start=start or Position(), seed=3, **more)), count)
    ]


MIXINGS: list[Mixing] = [
    AllTasks(),
    AllTasks(repeats={"b": 3}),
    RoundRobin(repeats={"a": 2}),
    Sampled(),
    Sampled(temperature=5.0, draws=3),
    Sampled(weights={"a": 1.0, "b": 9.0, "c": 2.0}),
]
mixed = st.builds(
    lambda mixing, end, limit: Mixture(tasks(), mixing=mixing, end=end, limit_batches=limit),
    st.sampled_from(MIXINGS),
    st.sampled_from(["min", "max", "cycle"]),
    st.sampled_from([None, 1, 3]),
)


@given(mixture=mixed, resume=st.integers(0, 24))
@settings(max_examples=12)
def test_any_position_is_a_place_to_start(mixture: Mixture, resume: int) -> None:
    whole = taken(mixture, 30)
    start = whole[resume][0]
    assert taken(mixture, 30 - resume, start) == whole[resume:]


@given(mixture=mixed, ranks=st.integers(2, 4))
@settings(max_examples=12)
def test_ranks_divide_what_one_process_has(mixture: Mixture, ranks: int) -> None:
    whole = taken(mixture, 12)
    parts = [taken(mixture, 12, rank=rank, ranks=ranks) for rank in range(ranks)]
    for one, *theirs in zip(whole, *parts, strict=True):
        assert all(part[:-1] == one[:-1] for part in theirs)
        assert sorted(micro for part in theirs for micro in part[-1]) == one[-1]
        assert [micro[0] for micro in one[-1]] == list(range(one[2]))


@given(mixture=mixed)
@settings(max_examples=12)
def test_epochs_have_as_many_batches_as_they_say(mixture: Mixture) -> None:
    whole = taken(mixture, 40)
    ends = [batch[0].batch + 1 for batch in whole if batch[4]]
    assert ends == [mixture.num_batches(epoch, seed=3) for epoch in range(len(ends))]


@given(mixture=mixed, resume=st.integers(0, 24), saved=st.integers(0, 24))
@settings(max_examples=12)
def test_a_mixture_goes_on_from_its_state_without_counting_from_the_start(
    mixture: Mixture, resume: int, saved: int
) -> None:
    whole = taken(mixture, 30)
    start = whole[max(resume, saved)][0]
    state = json.loads(json.dumps(mixture.state_dict(whole[saved][0])))
    again = Mixture(tasks(), mixing=mixture.mixing, end=mixture.end, limit_batches=mixture.limit_batches)
    again.load_state_dict(state)
    assert taken(again, 5, start) == whole[max(resume, saved) :][:5]
    assert again.state_dict(start) == mixture.state_dict(start)
    assert taken(again, 3) == whole[:3]  # as after a run that goes back


def values(batches: list[Any], task: str) -> list[int]:
    return [value for batch in batches for _, name, (value,), _ in batch[-1] if name == task]


def test_max_takes_every_sample_once_and_lets_those_that_are_through_wait() -> None:
    mixture = Mixture(tasks(), end="max")
    epoch = taken(mixture, mixture.num_batches(0, seed=3))
    for place, (name, count) in enumerate(SIZES.items()):
        assert sorted(values(epoch, name)) == [100 * place + n for n in range(count)]
    assert [len(batch[5]) for batch in epoch] == [3, 3, 2, 1]
    assert epoch[-1][4]


def test_the_fingerprint_tells_mixtures_apart() -> None:
    given = [
        Mixture(tasks()),
        Mixture(tasks(), end="max"),
        Mixture(tasks(), mixing=RoundRobin()),
        Mixture(tasks(), limit_batches=5),
        Mixture(tasks(batch=3)),
        Mixture(dict(reversed(tasks().items()))),
    ]
    prints = [str(mixture.fingerprint()) for mixture in given]
    assert len(set(prints)) == len(prints)
    assert Mixture(tasks()).fingerprint() == given[0].fingerprint()
