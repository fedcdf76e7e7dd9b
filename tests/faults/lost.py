"""Faults of runs that go on when a process is lost: who is hit, where, and how; all end at the undisturbed bits."""

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import battery
from scripts import Script

MINE: list[battery.Case] = []
case = partial(battery.case, slow=True, into=MINE)
SCRIPT = Path(__file__).with_name("elastic_run.py")
UPDATES = 20


def ran(**what: Any) -> list[dict[str, Any]]:
    """What each process that came to an end has said, by number."""
    with tempfile.TemporaryDirectory() as folder:
        end = Script(SCRIPT, folder, json.dumps({"updates": UPDATES, **what})).ended(230)
    said = [json.loads(line) for line in end.out.splitlines() if line.startswith("{")]
    assert said, end
    return sorted(said, key=lambda one: one["number"])


@cache
def undisturbed() -> str:
    return ran(count=1)[0]["sha256"]


def all_end_well(said: list[dict[str, Any]], numbers: list[int]) -> None:
    assert [one["number"] for one in said] == numbers, said
    for one in said:
        assert (one["error"], one["update"], one["sha256"]) == ("", UPDATES, undisturbed()), said


def killed(number: int, update: int, place: str) -> None:
    said = ran(count=3, hits=[[number, update, place, "SIGKILL"]])
    all_end_well(said, [0, 1, 2])
    others = [str(one["heard"]) for one in said if one["number"] != number]
    assert all(f"process {number} is lost" in heard for heard in others), said
    assert all(f"process {number} is there, with the state of the others" in heard for heard in others), said


case("process 1 of 3 is killed in a loss; the others go on, it comes back; ordered")(partial(killed, 1, 5, "loss"))
case("process 0 of 3 is killed in a loss; the others wait, it comes back; ordered")(partial(killed, 0, 5, "loss"))
case("process 2 of 3 is killed in an evaluation; it comes back; ordered")(partial(killed, 2, 8, "evaluate"))
case("process 2 of 3 is killed when an update that is saved has ended; ordered")(partial(killed, 2, 6, "end"))


@case("process 2 of 3 is frozen in a loss, and goes on when the others have; ordered")
def _() -> None:
    said = ran(count=3, timeout_s=6, hits=[[2, 5, "loss", "SIGSTOP"]])
    all_end_well(said, [0, 1, 2])


@case("process 1 of 3 raises in a loss; the others go on without it; ordered")
def _() -> None:
    said = ran(count=3, hits=[[1, 5, "loss", "raise"]])
    assert "a bug of the user's" in said[1]["error"], said
    all_end_well([said[0], said[2]], [0, 2])


@case("process 1 of 3 runs out of memory in a loss; all meet again, and it cuts finer; ordered")
def _() -> None:
    said = ran(count=3, hits=[[1, 5, "loss", "memory"]])
    assert [(one["error"], one["update"]) for one in said] == [("", UPDATES)] * 3, said
    assert len({one["sha256"] for one in said}) == 1, said
    assert any("ran out of memory in the forward of 2 samples" in str(one["heard"]) for one in said), said


CASES = [*battery.CASES, *MINE]
