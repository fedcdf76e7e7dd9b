"""Updates that are ready made: what is one batch, and what is several."""

from collections import namedtuple
from typing import Any

import pytest
import torch

from evenstep.data import Batch, ReadOptions, UpdateData, batches_in
from evenstep.errors import DataError

Named = namedtuple("Named", "images labels")


class Own:
    pass


OWN = Own()


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ([1, 2], [("", [1, 2])]),
        ({"x": 1}, [("", {"x": 1})]),
        (OWN, [("", OWN)]),
        (Named(1, 2), [("", Named(1, 2))]),
        (Named([1], "box"), [("", Named([1], "box"))]),
        (Batch(task="box", data=(1, 2)), [("box", (1, 2))]),
        (([1], "box"), [("box", [1])]),
        (([1], [2]), [("", [1]), ("", [2])]),
        ((Named(1, 2), ([1], "box")), [("", Named(1, 2)), ("box", [1])]),
        ((Batch(task="a", data=1), Batch(task="a", data=2)), [("a", 1), ("a", 2)]),
        (([1],), [("", [1])]),
    ],
)
def test_a_tuple_is_several_batches_and_everything_else_is_one(item: Any, expected: list[tuple[str, Any]]) -> None:
    assert [(batch.task, batch.data) for batch in batches_in(item)] == expected


@pytest.mark.parametrize("item", [(torch.ones(2), torch.zeros(2)), ([1], 2.0), (torch.ones(1), [1])])
def test_update_data_of_x_y_tuples_is_a_question_and_both_answers_work(item: Any) -> None:
    with pytest.raises(DataError):
        batches_in(item)
    assert [batch.data for batch in batches_in((item,))] == [item]
    assert len(batches_in(tuple(Batch(task="", data=one) for one in item))) == 2


class Stream:
    """Resumable updates of one to three batches."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Any:
        while self.given < 6:
            self.given += 1
            n = self.given
            yield tuple((torch.full((n,), float(k)), "ab"[k % 2]) for k in range(1 + n % 3))
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def shown(batches: Any) -> list[Any]:
    return [
        (batch.num_microbatches, batch.num_samples, batch.ends_epoch, [(m.index, m.task) for m in batch.microbatches])
        for batch in batches
    ]


def test_ranks_share_the_batches_of_every_update() -> None:
    whole = shown(next(batches) for batches in [UpdateData(Stream()).batches(ReadOptions(seed=1))] for _ in range(6))
    for ranks in (2, 4):
        parts = [
            shown(next(batches) for _ in range(6))
            for rank in range(ranks)
            for batches in [UpdateData(Stream()).batches(ReadOptions(seed=1, rank=rank, ranks=ranks))]
        ]
        for one, *theirs in zip(whole, *parts, strict=True):
            assert all(part[:3] == one[:3] for part in theirs)
            assert [micro for part in theirs for micro in part[3]] == one[3]


def test_it_goes_on_where_it_was_saved() -> None:
    data = UpdateData(Stream())
    batches = data.batches(ReadOptions(seed=1))
    whole = [next(batches) for _ in range(6)]
    data = UpdateData(Stream())
    batches = data.batches(ReadOptions(seed=1))
    for _ in range(3):
        following = next(batches).following
    resumed = UpdateData(Stream())
    resumed.load_state_dict(data.state_dict())
    rest = resumed.batches(ReadOptions(start=following, seed=1))
    assert shown(next(rest) for _ in range(3)) == shown(whole[3:])
