import sys
from itertools import islice
from pathlib import Path
from random import random
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "usage"))

from streams_programs import Augmenting, Buffered, Counting, ForgetsGenerator, LateState

from evenstep.data import Position, StreamData
from evenstep.errors import DataError


class LateWithFile(LateState):
    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("cannot copy an open file")


def data(stream: object, **options: Any) -> StreamData:
    def collate(items: list[Any]) -> list[Any]:
        return [one[0].tolist() for one in items]

    return StreamData(stream, global_batch_size=2, collate=collate, **options)


def numbers(of: StreamData, count: int, start: Position | None = None) -> list[Any]:
    return [batch.microbatches[0].data for batch in islice(of.batches(start or Position(), seed=1), count)]


@pytest.mark.parametrize("kind", [Counting, Augmenting])
def test_a_stream_whose_state_says_all_is_left_at_its_beginning_and_nothing_is_said(kind: type[Counting]) -> None:
    tried, untried = data(kind()), data(kind())
    assert tried.try_resume() == ""
    assert numbers(tried, 13) == numbers(untried, 13)


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Buffered, "of the items after the first 2"), (ForgetsGenerator, "the next epoch began with other")],
)
def test_a_stream_whose_state_does_not_say_all_is_refused_with_what_to_do(kind: type[Counting], what: str) -> None:
    with pytest.raises(
        DataError, match=rf"would not resume exactly: .*{what}.*`MapData`.*`exact_resume=False`, in a run file `data"
    ):
        data(kind()).try_resume()


def test_that_an_inexact_resume_is_meant_is_said_and_nothing_is_tried() -> None:
    stream = Buffered()
    assert "was said not to resume exactly" in data(stream, exact_resume=False).try_resume()
    assert stream.next == 0


def test_a_stream_that_knows_its_state_late_is_tried_on_a_copy() -> None:
    stream = LateState()
    assert data(stream).try_resume() == ""
    assert not stream.began


def test_that_a_stream_can_not_be_tried_is_said() -> None:
    assert "could not be tried: before it is read" in data(LateWithFile()).try_resume()


def test_a_stream_that_fails_when_it_is_sent_back_is_an_error() -> None:
    class Broken(Counting):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("shard_idx")

    with pytest.raises(DataError, match="resumes exactly raised KeyError: 'shard_idx'"):
        data(Broken()).try_resume()


def test_a_stream_without_state_or_that_is_being_read_is_not_tried() -> None:
    assert data(range(4)).try_resume() == ""
    stream = Counting()
    reading = data(stream)
    numbers(reading, 1)
    assert reading.try_resume() == "" and stream.next == 3


def test_what_a_stream_draws_is_keyed_by_item_whatever_is_drawn_in_between_and_on_resume() -> None:
    undisturbed = numbers(data(Augmenting()), 14)
    first = data(Augmenting())
    batches = first.batches(Position(), seed=1)
    taken = []
    for _ in range(7):
        torch.rand(3), np.random.rand(), random()
        before = torch.random.get_rng_state()
        batch = next(batches)
        assert torch.equal(torch.random.get_rng_state(), before)
        taken.append(batch.microbatches[0].data)
    second = data(Augmenting())
    second.load_state_dict(first.state_dict())
    assert taken + numbers(second, 7, batch.following) == undisturbed
    other_seed = next(data(Augmenting()).batches(Position(), seed=2))
    assert other_seed.microbatches[0].data != undisturbed[0]
