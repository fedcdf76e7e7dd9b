"""Membership of ranks around one real store, and connections that are formed anew."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from launched import on_ranks
from through_host_programs import Elsewhere, of_the_host
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, TCPStore

from evenstep.parallel import Processes, membership, renewable
from evenstep.parallel.membership import Membership
from evenstep.parallel.renewable import RenewableNccl


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ANSWER_S", 0.5)


def member(store: TCPStore, rank: int, count: int, break_: Callable[[], Any] = lambda: lambda: None) -> Membership:
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    return Membership(PrefixStore("members", client), rank, count, break_, holds_store=rank == 0, answer_s=0.5)


def members(store: TCPStore, count: int) -> list[Membership]:
    return [member(store, rank, count) for rank in range(count)]


def leave(ranks: list[Membership]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(Membership.leave, ranks))


def soon(found: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not found() and time.monotonic() < until:
        time.sleep(0.01)
    assert found()


def meet(ranks: list[Membership], **more: Any) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda one: one[1].meet(b"%d" % one[0], 20.0, **more), enumerate(ranks)))


def test_all_ranks_read_the_first_failure_whatever_its_letters(store: TCPStore) -> None:
    ranks = members(store, 3)
    ranks[1].fail("no such file: caf\udce9.png")
    ranks[2].fail("rank 2 failed because of it")
    for rank in ranks:
        soon(lambda rank=rank: rank.known_failure)
        assert rank.failure() == rank.over() == "no such file: caf\\udce9.png"
        assert rank.interrupted() == ""
    leave(ranks)


def test_a_failure_ends_with_its_epoch(store: TCPStore) -> None:
    ranks = members(store, 2)
    ranks[0].fail("rank 0 failed")
    assert meet(ranks, after_failure=True) == [([b"0", b"1"], [])] * 2
    for rank in ranks:
        rank.epoch += 1
    assert [rank.failure() for rank in ranks] == ["", ""]
    ranks[1].fail("rank 1 failed")
    soon(lambda: ranks[0].known_failure == "rank 1 failed")
    leave(ranks)


def test_lost_ranks_are_told_from_late_ones(store: TCPStore) -> None:
    first, second = members(store, 2)
    assert first.absent() == []
    assert first.absent(is_late=True) == [1]  # there, but it does not wait
    second.waits = True
    assert first.absent(is_late=True) == []
    first._ranks = 3  # the third has never come
    assert first.absent() == first.absent(is_late=True) == [2]
    first._ranks = 2
    leave([first, second])


def test_without_the_store_nothing_waits_for_long() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = member(store, 0, 2)
    del store
    began = time.monotonic()
    rank.fail("nobody reads this")
    assert rank.failure() == ""
    assert rank.absent() is None
    assert rank.meet(b"", 60.0) == ([], [])
    rank.leave()
    assert time.monotonic() - began < 4


def test_the_connections_of_a_rank_break_once_it_has_begun_the_interrupted_work(store: TCPStore) -> None:
    broken: list[int] = []
    first = member(store, 0, 2, lambda: lambda: broken.append(first.work))
    second = member(store, 1, 2)
    for _ in range(2):
        second.begin_work()
    first.begin_work()
    second.interrupt("rank 1 ran out of memory")
    first.over()
    assert (broken, first.interrupted()) == ([], ""), "it may still read what others sent in the first work"
    first.begin_work()
    assert (broken, first.interrupted()) == ([2], "rank 1 ran out of memory")
    first.epoch += 1
    first.break_if_over()
    assert (broken, first.over()) == ([2], ""), "an older epoch is over"
    leave([first, second])


def test_the_connections_of_a_rank_in_the_interrupted_work_break_at_once(store: TCPStore) -> None:
    broken: list[str] = []
    first, second = member(store, 0, 2, lambda: lambda: broken.append("now")), member(store, 1, 2)
    second.interrupt("rank 1 ran out of memory")
    soon(lambda: broken)
    leave([first, second])


def test_a_lost_rank_is_named_at_a_meeting_within_seconds(store: TCPStore) -> None:
    first, second = members(store, 2)
    first.epoch = second.epoch = 1
    first._ranks = 3  # the third has never come
    began = time.monotonic()
    assert first.meet(b"", 60.0) == ([], [2]), "the second is there, and may still compute"
    assert time.monotonic() - began < 20
    first._ranks = 2
    leave([first, second])


def test_a_meeting_ends_when_a_rank_has_failed_for_good(store: TCPStore) -> None:
    first, second = members(store, 2)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(first.meet, b"", 60.0)
        second.fail("rank 1 failed")
        assert meeting.result(timeout=20) == ([], [])
    leave([first, second])


class Said:
    """Stands in for NCCL and its device: notes what is asked of both, and in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
        self.calls: list[Any] = []

        def connect(*given: Any) -> Any:
            self.calls.append(("connect", store.add("epoch 0/came", 0), given[-1]))
            return SimpleNamespace(abort=lambda: self.calls.append("abort"))

        monkeypatch.setattr(renewable, "nccl_around", connect)
        monkeypatch.setattr(renewable, "group_around", lambda *given: SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.calls.append(("set", device)))


def test_nccl_connects_once_all_ranks_have_come_and_not_in_the_first_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Said(monkeypatch, store := HashStore())
    store.add("epoch 0/came", 1)  # the other rank
    RenewableNccl(store, 0, 2, timedelta(seconds=5))
    assert said.calls == [("connect", 2, torch.device("cuda:3"))]
    with pytest.raises(RuntimeError, match="1 of 2 ranks came"):
        RenewableNccl(HashStore(), 0, 2, timedelta(seconds=0.01))
    assert len(said.calls) == 1


def test_nccl_is_aborted_by_a_thread_that_works_with_the_device_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, store := HashStore())
    group = RenewableNccl(store, 0, 1, timedelta(seconds=5))
    passed = iter([False, True])
    group._abort(group._backend, cast("Any", SimpleNamespace(query=lambda: said.calls.append("look") or next(passed))))
    assert said.calls[1:] == [("set", torch.device("cuda:3")), "look", "look", "abort"]


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_comes_back_is_written_at_the_end_and_not_before(comes_back: bool) -> None:
    tensor: Any = Elsewhere(torch.ones(3))

    group: Any = Processes.__new__(Processes)
    group._share_devices, group._members = True, SimpleNamespace()

    def begin(one: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: one.mul_(4))

    finish = group._begin("sum", tensor, begin, comes_back=comes_back)
    assert tensor.held.tolist() == [1, 1, 1]
    finish()
    assert tensor.held.tolist() == ([4, 4, 4] if comes_back else [1, 1, 1])


def test_the_hosts_own_tensors_go_by_gloo_also_where_devices_have_nccl() -> None:
    assert on_ranks(2, of_the_host) == [[3.0, 3.0]] * 2
