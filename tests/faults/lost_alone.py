"""Faults of runs whose ranks step alone and go on without a lost one: all end where the same is by hand, in float64."""

import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import battery
import torch
from alone_run import Life, by_hand
from scripts import Script

MINE: list[battery.Case] = []
case = partial(battery.case, slow=True, into=MINE)
SCRIPT = Path(__file__).with_name("elastic_run.py")
UPDATES, COUNT = 14, 3


def ran(settings: str, *hits: list[Any], folder: str | None = None, **what: Any) -> dict[int, dict[str, Any]]:
    """What each process that came to an end has said, by its number."""
    more = {name: what.pop(name) for name in ("fast", "resume", "asynchronous") if name in what}
    given = {"updates": UPDATES, "count": COUNT, "alone": {"settings": settings, **more}, "hits": hits, **what}
    with tempfile.TemporaryDirectory() as mine:
        end = Script(SCRIPT, folder or mine, json.dumps(given)).ended(230)
    said = [json.loads(line) for line in end.out.splitlines() if line.startswith("{")]
    assert said and not any(one["error"] for one in said), end
    return {one["number"]: one for one in said}


def lives_of(said: dict[int, dict[str, Any]], stayed: int) -> Callable[[int], list[Life]]:
    """Who made which update, as a process that was never lost has heard."""
    changes: list[tuple[int, list[Life]]] = [(1, [(number, 0) for number in range(COUNT)])]
    for kind, message, _ in said[stayed]["heard"]:
        if kind not in ("lost_rank", "rank_came"):
            continue
        gone, came = (
            {int(one) for match in re.findall(words, message) for one in re.findall(r"\d+", match)}
            for words in (r"process(?:es)? ([\d, ]+) (?:is|are) lost", r"process(?:es)? ([\d, ]+) (?:is|are) there")
        )
        had = [life for _, lives in changes for life in lives]
        lives = [life for life in changes[-1][1] if life[0] not in gone]
        lives += [(number, 1 + max(n for one, n in had if one == number)) for number in came]
        changes.append((int(re.findall(r"update (\d+) is dealt", message)[0]), sorted(lives)))
    return lambda update: next(lives for begin, lives in reversed(changes) if begin <= update)


def as_by_hand(
    said: dict[int, dict[str, Any]], settings: str, *, stayed: int = 0, missing: tuple[int, Life] | None = None
) -> None:
    """All are where the reference is.

    Args:
        stayed: a process that was never lost.
        missing: an update, and who made it but was lost before its share.
    """
    there = lives_of(said, stayed)
    assert any(there(update) != there(1) for update in range(1, UPDATES + 1)), "nobody was lost"

    def shares(update: int) -> list[Life]:
        return [life for life in there(update) if (update, life) != missing]

    shared, held = by_hand(settings, UPDATES, there, shares)
    assert sorted(said) == sorted(held)
    for number, one in said.items():
        assert one["update"] == UPDATES
        for ours, wanted in ((one["shared"], shared), (one["own"], held[number])):
            difference = float((torch.tensor(ours, dtype=torch.float64) - wanted).abs().max())
            assert difference < 1e-12, f"{difference:g} from the reference on process {number}"


def killed(settings: str, number: int, update: int, place: str, *more: list[Any], **what: Any) -> None:
    """A process is killed; whoever is left, and the one that takes its place, is where the reference is."""
    said = ran(settings, [number, update, place, "SIGKILL"], *more, **what)
    before_share = place in ("promised", "end", "share", "mean")
    as_by_hand(said, settings, stayed=1 if number == 0 else 0, missing=(update, (number, 0)) if before_share else None)


@case("local: process 1 of 3 is killed in a loss, and comes back at once with what all share")
def _() -> None:
    killed("local SGD", 1, 5, "loss")


@case("local: process 1 of 3 is killed in a loss of DiLoCo, and does not come back")
def _() -> None:
    killed("DiLoCo", 1, 7, "loss", again=False)


@case("local: process 1 of 3 is killed when an update before a share has ended; it comes back after a while")
def _() -> None:
    killed("DiLoCo", 1, 5, "end", away_s=4)


@case("local: process 2 of 3 is killed before it gives its part of a share; the others share over two")
def _() -> None:
    killed("DiLoCo", 2, 5, "share", again=False)


@case("local: process 0 of 3 is killed in a share, and comes back: it is not in that mean")
def _() -> None:
    killed("local SGD", 0, 6, "share")
