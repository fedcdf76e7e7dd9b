import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from evenstep.errors import EvenstepError
from evenstep.pipeline.wire import AHEAD, Address, Inbox, Wire

CPU = torch.device("cpu")
HERE = Address("output", 0, 1, 0)


class Pair(NamedTuple):
    first: Any
    second: Any


def number(microbatch: int) -> Address:
    return Address("output", 0, 1, microbatch)


TREES: list[Any] = [
    torch.arange(6.0).view(2, 3),
    (torch.ones(2, dtype=torch.bool), None, [torch.tensor(3, dtype=torch.int64)]),
    {"a": Pair(torch.zeros(0, 4), "name"), 3: 2.5},
    torch.ones(3, 2).t(),
    None,
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_a_tree_arrives_as_it_was(on_ranks: Callable[..., list[Any]], tree: Any) -> None:
    def act(group: Any) -> Any:
        wire = Wire(group, CPU)
        if group.rank == 0:
            wire.send(HERE, tree, 1)
            return wire.flush()
        return wire.receive(0)

    address, arrived = on_ranks(2, act)[1]
    assert address == HERE
    flat, wanted = (torch.utils._pytree.tree_flatten(each) for each in (arrived, tree))
    assert flat[1] == wanted[1]
    for mine, theirs in zip(flat[0], wanted[0], strict=True):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs)
            assert mine.dtype == theirs.dtype
        else:
            assert mine == theirs


def test_a_leaf_says_whether_it_wants_a_gradient(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> Any:
        wire = Wire(group, CPU)
        if group.rank == 0:
            wire.send(HERE, (torch.ones(2, requires_grad=True) * 2, torch.ones(2)), 1)
            return None
        _, (first, second) = wire.receive(0)
        return first.requires_grad, first.is_leaf, second.requires_grad

    assert on_ranks(2, act)[1] == (True, True, False)


def test_a_form_travels_only_when_it_changes(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> Any:
        wire, sent = Wire(group, CPU), []
        if group.rank:
            return [wire.receive(0)[1].shape[0] for _ in range(5)]
        plain = group.begin_send
        group.begin_send = lambda tensor, rank: (sent.append(tensor.dtype), plain(tensor, rank))[1]
        for microbatch, rows in enumerate([2, 2, 3, 3, 2]):
            wire.send(number(microbatch), torch.ones(rows), 1)
        return sent.count(torch.uint8)

    assert on_ranks(2, act) == [3, [2, 2, 3, 3, 2]]


def test_nothing_is_received_further_ahead_than_the_plan_allows(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> Any:
        wire = Wire(group, CPU)
        if group.rank == 0:
            for microbatch in range(10):
                wire.send(number(microbatch), torch.ones(1), 1)
            return None
        received: list[int] = []
        plain, arrived = wire.receive, threading.Semaphore(0)

        def receive(rank: int) -> Any:
            address, tree = plain(rank)
            received.append(address.microbatch)
            arrived.release()
            return address, tree

        wire.receive = receive
        seen: list[int] = []
        with Inbox(wire, group, {0: 10}) as inbox:
            for microbatch in range(10):
                inbox.allow(0)
                for _ in range(AHEAD + 1 if microbatch == 0 else int(microbatch < 10 - AHEAD)):
                    assert arrived.acquire(timeout=10)
                assert not arrived.acquire(timeout=0.02)
                seen.append(len(received))
                inbox.take(number(microbatch))
        return seen

    assert on_ranks(2, act)[1] == [min(microbatch + 1 + AHEAD, 10) for microbatch in range(10)]


def test_who_waits_is_told_why_nothing_will_come(on_ranks: Callable[..., list[Any]]) -> None:
    def act(group: Any) -> str:
        if group.rank == 0:
            group.abort("rank 0 has had enough")
            return ""
        with pytest.raises(EvenstepError) as raised, Inbox(Wire(group, CPU), group, {0: 1}) as inbox:
            inbox.allow(0)
            inbox.take(number(3))
        return str(raised.value)

    assert on_ranks(2, act)[1] == (
        "the output from stage 0 to stage 1 for micro-batch 3 will not come: rank 0 has had enough"
    )
