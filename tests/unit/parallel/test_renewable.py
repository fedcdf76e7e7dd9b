from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from evenstep.parallel import renewable
from evenstep.parallel.renewable import Connections, Renewable, RenewableNccl


class Noting(Renewable):
    """Notes when it is broken."""

    def breaker(self) -> Any:
        return lambda: self.broken.append(self.inner)


def connections() -> tuple[Connections, list[Any]]:
    made, group = Connections(), Noting(HashStore(), 0, 1, timedelta(seconds=5))
    group.broken = []
    return made, made.add(group).broken


def test_what_is_broken_off_before_this_rank_has_begun_it_is_broken_when_it_does() -> None:
    made, broken = connections()
    made.begin_work()
    made.break_off(0, 2)
    assert broken == [], "this rank may still read what the others have sent in the first work"
    made.begin_work()
    assert len(broken) == 1


def test_what_this_rank_is_in_or_past_is_broken_at_once() -> None:
    made, broken = connections()
    for _ in range(2):
        made.begin_work()
    made.break_off(0, 2)
    made.break_off(0, 1)
    assert len(broken) == 2


def test_a_second_abort_during_the_forming_of_groups_is_noticed() -> None:
    made, broken = connections()
    made.begin_work()
    made.break_off(1, 1)
    assert broken == []
    made.renew(timedelta(seconds=5))
    assert len(broken) == 1


def test_an_older_attempt_is_over() -> None:
    made, broken = connections()
    made.begin_work()
    made.renew(timedelta(seconds=5))
    made.break_off(0, 1)
    assert broken == []


class Said:
    """Stands in for NCCL and its device: notes what is asked of both, and in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
        self.calls: list[Any] = []

        def connect(*given: Any) -> Any:
            self.calls.append(("connect", store.add("attempt 0/came", 0), given[-1]))
            return SimpleNamespace(abort=lambda: self.calls.append("abort"))

        monkeypatch.setattr(renewable, "nccl_around", connect)
        monkeypatch.setattr(renewable, "group_around", lambda *given: SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.calls.append(("set", device)))


def test_nccl_connects_once_all_ranks_have_come_and_not_in_the_first_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Said(monkeypatch, store := HashStore())
    store.add("attempt 0/came", 1)  # the other rank
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
