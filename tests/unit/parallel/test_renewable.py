from datetime import timedelta
from typing import Any

from torch.distributed import HashStore

from evenstep.parallel.renewable import Connections, Renewable


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


def test_a_rank_that_breaks_off_again_before_this_one_is_through_with_forming_groups_is_heard() -> None:
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
