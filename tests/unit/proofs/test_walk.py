"""Ranks of 512 are walked one at a time in this process: all of a group say the same, whoever has work."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "proofs"))

from fake_group import CollectiveRecord, Fake

from evenstep.parallel import Ddp, Fsdp, Group, Reducer, Single, Strategy, Zero1
from evenstep.parallel.reducer import BucketReducer
from rows import walk
from rows.walk import FLAT, MESH

EDGES = [0, 1, 3, 4, 8, 131, 255, 256, 511]  # first, last and inner places of every axis


def test_all_ranks_of_a_group_say_the_same_on_a_mesh_of_three_axes() -> None:
    assert MESH.ranks == 512
    assert MESH.different(EDGES) == []


def test_all_ranks_of_one_axis_say_the_same_also_those_without_work() -> None:
    assert FLAT.different([0, 1, 2, 300, 510]) == []  # rank 0 has no micro-batch in the short batches


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
    # weights and their ranks, skipped samples and a stamp, presence of gradients, requests
    assert sum(counts.values()) - gradients == 8 * (2 * 91 + 2 + 4 + 2)


class ForgetfulReducer(BucketReducer):
    """Ranks without work do not take part: the mistake that a walk is there to find."""

    def reduce(self) -> None:
        if any(bucket.sum for bucket in self._buckets):
            super().reduce()


class VerboseReducer(BucketReducer):
    """One rank sends more."""

    def after_update(self, update: int) -> None:
        if self.group.rank == 3:
            self.group.gather("a word of rank 3")
        super().after_update(update)


class Mistaken(Strategy):
    """Replicas whose gradients are summed by a reducer with a mistake."""

    def __init__(self, group: Group, kind: type[BucketReducer]) -> None:
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


def test_what_strategies_give_to_torch_is_written_down_with_its_group_and_bytes() -> None:
    import torch
    import torch.distributed as dist

    said: list[CollectiveRecord] = []
    with walk.fake_processes(5, 8), walk.Collectives(said):
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        said.clear()
        dist.all_reduce(torch.zeros(3), group=mesh["replicate"].get_group())
        module = torch.nn.Linear(8, 8)
        torch.distributed.fsdp.fully_shard(module, mesh=mesh["shard"])
        module(torch.zeros(1, 8)).sum().backward()
    assert said[0] == CollectiveRecord("allreduce", "2 ranks, 4 apart", 12)
    assert {word.group for word in said[1:]} == {"4 ranks, 1 apart"}
    assert any("reduce_scatter" in word.kind for word in said)


def test_a_fake_rank_that_leaves_the_script_is_an_error() -> None:
    from evenstep.errors import ReplicaError

    leader = Fake(0, 4)
    leader.gather("x")
    follower = Fake(1, 4, heard=leader.heard)
    assert follower.gather("y") == ["x", "y", "x", "x"]
    with pytest.raises(ReplicaError):
        follower.sum_floats([1.0])


def test_a_fake_rank_that_trains_otherwise_than_the_one_it_follows_is_an_error() -> None:
    from evenstep.data import GlobalBatch, Position
    from evenstep.errors import ReplicaError
    from evenstep.train.update.weigh import weigh

    batch = GlobalBatch(
        position=Position(),
        following=Position(batch=1),
        microbatches=(),
        num_microbatches=1,
        num_samples=1,
        ends_epoch=False,
    )
    leader = Fake(0, 4)
    weigh({"": walk.Square()}, batch, leader, stamp=3.0)
    weigh({"": walk.Square()}, batch, Fake(1, 4, heard=leader.heard), stamp=3.0)
    with pytest.raises(ReplicaError):
        weigh({"": walk.Square()}, batch, Fake(1, 4, heard=leader.heard), stamp=0.75)


def test_one_rank_alone_says_nothing() -> None:
    said = replace(MESH, axes={"data": 1, "tensor": 2}, strategy=Single)(1).said
    assert {word.kind for word in said if word.group} <= {"gather", "sum_floats"}
