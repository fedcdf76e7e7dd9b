"""Ranks that may be lost: who is in a group, and what such a run may not have."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kit
from evenstep import StreamData, Trainer
from evenstep.contrib.elastic import Elastic
from evenstep.contrib.elastic.membership import Peer, _enough
from evenstep.errors import ArgumentError, LostRankError
from evenstep.parallel import Ddp, Group, RankInfo, Strategy, Zero1


def member(number: int, *, tries: int = 0, patient: bool = False, name: str = "") -> Peer:
    return Peer(number=number, name=name or f"{number}", tries=tries, patient=patient, store="localhost:1")


class Answers:
    """A lighthouse that gives these answers, one after the other, then the last one for ever."""

    def __init__(self, *answers: list[Peer], number: int = 0, count: int = 2) -> None:
        self.place = RankInfo(rank=number, ranks=count, address="http://localhost:1")
        self.name = f"{number}"
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def ask(self, **said: Any) -> list[Peer]:
        self.asked.append(said)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            replace(one, store=said["store"], tries=said["tries"]) if one.name == self.name else one for one in answer
        ]

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("members", "enough"),
    [
        ([member(0, patient=True), member(1, patient=True)], True),
        ([member(0, patient=True)], False),  # the other may still come
        ([member(0)], True),  # it has been waited for, or has been there before
        ([member(1)], False),  # who keeps the folder is not there
        ([member(0), member(1, name="old"), member(1, name="new")], False),
    ],
)
def test_a_group_has_all_members_or_the_ready_members_but_always_the_first(members: list[Peer], enough: bool) -> None:
    assert _enough(members, 2) is enough


def test_a_process_joins_and_sees_when_others_have_come() -> None:
    both = [member(0), member(1)]
    lighthouse: Any = Answers([member(0)], [member(0)], both)
    group = Elastic(lighthouse, timeout_s=30)
    try:
        group.join(0)
        assert (group.rank, group.ranks, group.members) == (0, 1, {"0": 0})
        total = torch.ones(2)
        group.sum(total)()
        assert group.gather("a") == ["a"] and total.tolist() == [1.0, 1.0]
        group.at(1)
        with pytest.raises(LostRankError):
            group.at(2)
        assert [asked["tries"] for asked in lighthouse.asked] == [0, 0, 0]
        assert [asked["update"] for asked in lighthouse.asked] == [0, 0, 1]
    finally:
        group.close()


def test_a_group_whose_first_process_is_lost_as_it_is_formed_is_formed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lighthouse: Any = Answers([member(0)])
    group = Elastic(lighthouse, timeout_s=30)

    def gone(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("the store is gone")

    monkeypatch.setattr("evenstep.parallel.processes.Membership", gone)
    try:
        group.join(0)
        assert (group.ranks, [asked["tries"] for asked in lighthouse.asked]) == (1, [0, 1])
    finally:
        group.close()


def test_without_the_first_process_the_others_give_up_after_the_timeout() -> None:
    lighthouse: Any = Answers([member(1)], number=1)
    group = Elastic(lighthouse, timeout_s=0.2)
    with pytest.raises(LostRankError):
        group.join(4)


class Lonely:
    """A lighthouse that sees one of two."""

    name = "0"

    def __init__(self, number: int) -> None:
        self.place = RankInfo(rank=number, ranks=2, address="http://localhost:1")

    def close(self) -> None: ...


def trainer(strategy: Callable[[Group], Strategy], *, number: int = 0, **more: Any) -> Trainer:
    lighthouse: Any = Lonely(number)
    return kit.trainer_of(strategy=strategy(Elastic(lighthouse, timeout_s=1)), **more)


def test_streams_and_ranks_that_hold_parts_of_the_state_are_refused() -> None:
    with pytest.raises(ArgumentError):
        trainer(Ddp, data=StreamData(range(4), global_batch_size=2))
    with pytest.raises(ArgumentError):
        trainer(lambda group: Zero1(group, reduction="fast"))


def test_a_process_that_has_not_met_the_first_one_resumes_from_nothing(tmp_path: Path) -> None:
    assert trainer(Ddp, number=1, folder=tmp_path).resume("auto") is None
