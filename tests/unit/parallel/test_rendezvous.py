"""What ranks write into the store when they come; with real processes: tests/ranks/test_joining.py."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from evenstep.parallel import rendezvous
from evenstep.parallel.rank_info import RankInfo


def came(store: HashStore, rank: int, ranks: int = 2) -> str:
    return rendezvous._announce(store, RankInfo(rank=rank, ranks=ranks))


def test_the_last_to_come_lets_all_go_on() -> None:
    store = HashStore()
    assert came(store, 1) == came(store, 0) == ""
    assert rendezvous._wait(store, RankInfo(rank=1, ranks=2), timeout_s=1, left_s=1) == ""


def came_from_elsewhere(monkeypatch: pytest.MonkeyPatch, store: HashStore, rank: int) -> str:
    monkeypatch.setattr(rendezvous, "this_process", lambda: "process 1 on elsewhere")
    return came(store, rank)


def test_what_was_said_first_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first = [came(store, 1), came_from_elsewhere(monkeypatch, store, 1)]
    assert first[0] == "" and first[1].startswith("two processes are rank 1")
    assert rendezvous._wait(store, RankInfo(rank=0, ranks=2), timeout_s=1, left_s=1) == first[1]


def test_a_second_process_of_a_rank_that_comes_when_all_have_gone_on_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    assert [came(store, 0), came(store, 1)] == ["", ""]
    assert came_from_elsewhere(monkeypatch, store, 1).startswith("two processes are rank 1")
    assert rendezvous._wait(store, RankInfo(rank=0, ranks=2), timeout_s=1, left_s=1) == ""


def test_another_version_is_refused_by_name() -> None:
    store = HashStore()
    came(store, 0)
    before, torch.__version__ = torch.__version__, "1.0"
    try:
        said = came(store, 1)
    finally:
        torch.__version__ = before
    assert said.startswith("all ranks must be started alike, but torch is 1.0 for rank 1")
