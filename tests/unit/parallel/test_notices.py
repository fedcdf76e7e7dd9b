"""Ranks as threads, or as this test itself, around one real store."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from evenstep.parallel import notices
from evenstep.parallel.notices import Notices


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "ANSWER_S", 0.5)


def ranks_of(store: TCPStore, count: int) -> list[Notices]:
    made: list[Notices] = []
    for rank in range(count):
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        made.append(Notices(PrefixStore("notices", client), rank, count, holds_store=rank == 0, answer_s=0.5))
    return made


def soon(what: str, rank: Notices) -> None:
    until = time.monotonic() + 10
    while rank.failure_message != what and time.monotonic() < until:
        time.sleep(0.01)
    assert rank.failure_message == what


def test_all_ranks_receive_the_first_notice(store: TCPStore) -> None:
    first, second, third = ranks_of(store, 3)
    second.post("rank 1 failed")
    third.post("rank 2 failed because of it")
    for rank in (first, second, third):
        soon("rank 1 failed", rank)
        assert rank.failure() == "rank 1 failed"
    for rank in (first, second, third):
        rank.leave()


def test_a_word_with_what_no_file_can_hold_is_heard(store: TCPStore) -> None:
    first, second = ranks_of(store, 2)
    second.post("no such file: caf\udce9.png")
    soon("no such file: caf\\udce9.png", first)
    for rank in (first, second):
        rank.leave()


def test_a_failure_ends_with_its_attempt(store: TCPStore) -> None:
    ranks = ranks_of(store, 2)
    ranks[0].post("rank 0 failed")
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda rank: rank.meet(b"again", 20.0, after_failure=True), ranks))
    assert told == [([b"again", b"again"], [])] * 2
    for rank in ranks:
        rank.attempt += 1
    assert [rank.failure() for rank in ranks] == ["", ""]
    ranks[1].post("rank 1 failed")
    soon("rank 1 failed", ranks[0])
    for rank in ranks:
        rank.leave()


def test_a_rank_that_failed_stays_only_until_the_others_have_heard(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "ANSWER_S", 20.0)
    first, second = ranks_of(store, 2)
    first.post("rank 0 failed")
    began = time.monotonic()
    first.leave()
    assert time.monotonic() - began < 10
    assert second.failure_message == "rank 0 failed"


def test_who_holds_the_store_leaves_last(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks_of(store, 2)
    began = time.monotonic()
    first.leave()
    assert time.monotonic() - began >= 0.5  # for the whole of its patience: the other is still there
    second.leave()
    monkeypatch.setattr(notices, "ANSWER_S", 20.0)
    third, fourth = ranks_of(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 2)
    fourth.leave()
    began = time.monotonic()
    third.leave()
    assert time.monotonic() - began < 10


def test_asking_all_tells_who_is_gone_from_who_is_late(store: TCPStore) -> None:
    (first, second), silent = ranks_of(store, 2), 2
    first._ranks = 3  # the third has never come
    assert first.missing(late=False) == [silent]
    assert first.missing(late=True) == [silent]
    first._ranks = 2
    assert first.missing(late=False) == []
    assert first.missing(late=True) == [1]  # there, but it does not wait
    second.is_waiting = True
    assert first.missing(late=True) == []


def test_without_the_store_nothing_waits_for_long() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    rank = Notices(PrefixStore("notices", client), 0, 2)
    del store
    began = time.monotonic()
    rank.post("nobody hears this")
    assert rank.failure() == ""
    assert rank.missing(late=True) is None
    rank.leave()
    assert time.monotonic() - began < 4


def test_who_breaks_off_is_heard_by_all_and_the_first_reason_is_kept(store: TCPStore) -> None:
    heard: list[tuple[int, int]] = []
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    first = Notices(PrefixStore("notices", client), 0, 2, broken=lambda *what: heard.append(what))
    second = Notices(PrefixStore("notices", store), 1, 2)
    first.attempt = second.attempt = 3
    assert first.broken_off() == (0, "")
    second.break_off(7, "rank 1 ran out of memory")
    first.break_off(7, "rank 0 ran out of memory")
    until = time.monotonic() + 10
    while (3, 7) not in heard and time.monotonic() < until:
        time.sleep(0.01)
    assert (3, 7) in heard
    assert first.broken_off() == second.broken_off() == (7, "rank 1 ran out of memory")
    first.attempt = 4
    assert first.broken_off() == (0, ""), "the next attempt is another"
    for rank in (first, second):
        rank.leave()


def test_of_two_works_that_are_broken_off_the_earlier_counts(store: TCPStore) -> None:
    first, second = ranks_of(store, 2)
    first.break_off(8, "rank 0 ran out of memory")
    second.break_off(7, "rank 1 ran out of memory")
    first.break_off(9, "rank 0 ran out of memory again")
    assert first.broken_off() == (7, "rank 1 ran out of memory")
    for rank in (first, second):
        rank.leave()


def test_all_that_meet_get_what_each_has_left(store: TCPStore) -> None:
    ranks = ranks_of(store, 3)
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(lambda rank: rank.meet(b"%d" % rank._rank, 20.0), ranks))
    assert told == [([b"0", b"1", b"2"], [])] * 3
    for rank in ranks:
        rank.leave()


def test_a_meeting_that_takes_a_while_leaves_no_warning(store: TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = ranks_of(store, 2)
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(ranks[0].meet, b"early", 5.0)
        time.sleep(0.3)
        late = pool.submit(ranks[1].meet, b"late", 5.0)
        assert early.result() == late.result() == ([b"early", b"late"], [])
    for rank in ranks:
        rank.leave()
    assert capfd.readouterr().err == ""


def test_who_does_not_come_to_a_meeting_because_it_is_gone_is_named_within_seconds(store: TCPStore) -> None:
    first, second = ranks_of(store, 2)
    first._ranks = 3  # the third has never come
    began = time.monotonic()
    assert first.meet(b"", 60.0) == ([], [2]), "the second is there, and may still compute"
    assert time.monotonic() - began < 20
    for rank in (first, second):
        rank.leave()


def test_a_meeting_ends_when_a_rank_has_failed_for_good(store: TCPStore) -> None:
    first, second = ranks_of(store, 2)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(first.meet, b"", 60.0)
        second.post("rank 1 failed")
        assert meeting.result(timeout=20) == ([], None)
    for rank in (first, second):
        rank.leave()


def test_a_rank_whose_program_has_ended_is_known_to_those_that_go_on(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_RINGS_AFTER_S", 0.1)
    first, second, third = ranks_of(store, 3)
    assert second.ended() == []
    third.leave(waits=False)  # which only leaves the group
    assert second.ended() == []
    first.leave()  # who holds the store and so waits, in vain, for those that go on
    assert second.left == [0]  # without having to ask, as the store may be gone by now
    second.leave()
