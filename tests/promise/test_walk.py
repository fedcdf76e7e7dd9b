"""Ranks of 512 are walked one at a time in this process: all of a group say the same, whoever has work."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import walk
from fake_group import Fake
from torch import nn
from walk import MESH

from evenstep.parallel import Ddp, Fsdp, Group, Reducer, Strategy, Zero1

EDGES = [0, 1, 3, 4, 8, 131, 255, 256, 511]  # first, last and inner places of every axis


def test_all_ranks_of_a_group_say_the_same_on_a_mesh_of_three_axes() -> None:
    assert MESH.ranks == 512
    assert MESH.different(EDGES) == []


def test_a_walk_trains_evaluates_saves_and_aborts() -> None:
    walked = MESH(511)
    marks = [word.kind for word in walked.said if not word.group]
    updates = ["update 1", "update 2", "evaluate", "save", "update 3", "abort", "update 3", "update 4"]
    assert marks == [*updates, "evaluate", "save"]
    assert walked.group == "64 ranks, 4 apart"
    assert all(word.group == walked.group for word in walked.said if word.group)


def test_a_walk_with_an_update_says_little_more_than_its_gradients() -> None:
    walked = replace(MESH, strategy=partial(Ddp, reduction="fast"))(511)
    counts = walk.bytes_per_update(walked.said)
    gradients = 4 * (8 * 96 + 96 + 96 * 96 + 96)
    assert counts["sum"] == gradients
    # weights and their ranks, buffers to share, skipped samples and a stamp, presence of gradients, requests
    assert sum(counts.values()) - gradients == 8 * (2 * 91 + 3 + 4 + 2)


class ForgetfulReducer(Reducer):
    """Ranks without work do not take part: the mistake that a walk is there to find."""

    def reduce(self) -> None:
        if any(bucket.present for bucket in self._buckets):
            super().reduce()


class VerboseReducer(Reducer):
    """One rank sends more."""

    def reduce(self) -> None:
        super().reduce()
        if self.group.rank == 3:
            self.group.gather("a word of rank 3")


class Mistaken(Strategy):
    """Replicas whose gradients are summed by a reducer with a mistake."""

    def __init__(self, group: Group, kind: type[Reducer]) -> None:
        super().__init__(group)
        self._kind = kind

    def reducer(self, module: nn.Module, *, per_plan: bool = False) -> Reducer:
        return self._kind(module, self.group, ordered=False)


@pytest.mark.parametrize(
    "strategy", [lambda group: Zero1(group, reduction="fast"), Fsdp, lambda group: Fsdp(group, shard_ranks=8)]
)
def test_all_ranks_say_the_same_with_shards(strategy: Callable[[Fake], Strategy]) -> None:
    walked = replace(MESH, axes={"pipeline": 2, "data": 16, "tensor": 2}, microbatches=24, strategy=strategy)
    assert walked.different([0, 2, 9, 62]) == []


@pytest.mark.parametrize(("mistake", "wrong"), [(ForgetfulReducer, [0]), (VerboseReducer, [12])])
def test_a_walk_finds_ranks_that_say_something_else(mistake: Any, wrong: list[int]) -> None:
    walked = replace(MESH, axes={"data": 64, "tensor": 4}, strategy=lambda group: Mistaken(group, mistake))
    assert walked.different([0, 12, 252] if wrong == [12] else [0, 8, 252]) == wrong
