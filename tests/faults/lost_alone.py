"""Faults of runs whose ranks step alone and go on without a lost one: all end where the same is by hand, in float64."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import battery
import torch
from alone_run import Life, by_hand, flat
from scripts import Script

MINE: list[battery.Case] = []
case = partial(battery.case, slow=True, into=MINE)
SCRIPT = Path(__file__).with_name("elastic_run.py")
UPDATES, COUNT = 14, 3
Said = dict[int, dict[str, Any]]  # what each process has said, by its number
Made = Callable[[int], list[Life]]  # who makes an update, or shares after it


def ran(settings: str, *hits: list[Any], folder: str | None = None, fails: int | None = None, **what: Any) -> Said:
    """What each process that came to an end has said, by its number; none but `fails` has an error."""
    more = {
        name: what.pop(name)
        for name in ("fast", "resume", "run", "asynchronous", "micro", "slow_save", "scaled")
        if name in what
    }
    given = {"updates": UPDATES, "count": COUNT, "alone": {"settings": settings, **more}, "hits": hits, **what}
    with tempfile.TemporaryDirectory() as mine:
        end = Script(SCRIPT, folder or mine, json.dumps(given)).ended(230)
    said = [json.loads(line) for line in end.out.splitlines() if line.startswith("{")]
    assert said and not any(one["error"] for one in said if one["number"] != fails), end
    return {one["number"]: one for one in said}


def lives_of(said: Said, stayed: int, count: int = COUNT) -> Made:
    """Who made which update, as a process that was never lost has heard."""
    changes: list[tuple[int, list[Life]]] = [(1, [(number, 0) for number in range(count)])]
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


def far(said: Said, settings: str, there: Made, shares: Made, *, norm: bool = False, fast: bool = False) -> float:
    """How far any process is from the reference: in what is shared, its average, what it holds, running statistics."""
    shared, average, models = by_hand(settings, UPDATES, there, shares, norm=norm, fast=fast)
    distance = 0.0
    for one, model in zip((said[number] for number in sorted(said)), models, strict=True):
        assert one["update"] == UPDATES
        statistics = torch.cat([torch.zeros(1), *(buffer.double().flatten() for buffer in model.buffers())])
        wanted = torch.cat([shared, average, flat(model), statistics])
        ours = torch.tensor([*one["shared"], *one["average"], *one["own"], 0.0, *one["buffers"]], dtype=torch.float64)
        distance = max(distance, float((ours - wanted).abs().max()))
    return distance


def compared(said: Said, settings: str, there: Made, shares: Made, **how: bool) -> None:
    """All are where the reference is."""
    assert (distance := far(said, settings, there, shares, **how)) < 1e-12, f"{distance:g} from the reference"


def killed(
    settings: str,
    number: int,
    update: int,
    place: str,
    *more: list[Any],
    stayed: int = 0,
    missing: Sequence[tuple[int, Life]] = (),
    **what: Any,
) -> Said:
    """A process is killed; whoever is left, and the one that takes its place, is where the reference is.

    Args:
        more: other hits.
        stayed: a process that is never lost.
        missing: updates, and who made each but was lost before its share, besides the one that is killed.
    """
    said = ran(settings, [number, update, place, "SIGKILL"], *more, **what)
    there = lives_of(said, stayed, what.get("count", COUNT))
    assert any(there(one) != there(1) for one in range(1, UPDATES + 1)), "nobody was lost"
    assert place != "loss" or (number, 0) not in there(update), "the update under way was not done again"
    if place in ("promised", "end", "share", "mean"):
        missing = [*missing, (update, (number, 0))]

    def shares(update: int) -> list[Life]:
        return [life for life in there(update) if (update, life) not in missing]

    compared(said, settings, there, shares, norm=what.get("norm", False), fast=what.get("fast", False))
    return said


def again(one: Said, other: Said) -> None:
    """Both have ended with the same bits, of all that training changes."""
    assert {number: said["sha256"] for number, said in one.items()} == {n: said["sha256"] for n, said in other.items()}


@case("local: process 1 of 3 is killed in a loss, and comes back at once with what all share")
def _() -> None:
    killed("local SGD", 1, 5, "loss", scaled=True)


@case("local: process 1 of 3 is killed in a loss of DiLoCo, and does not come back; the same bits a second time")
def _() -> None:
    again(*(killed("DiLoCo", 1, 7, "loss", again=False, scaled=scaled) for scaled in (False, True)))


@case("local: process 1 of 3 is killed when an update before a share has ended; it comes back after a while; fast")
def _() -> None:
    killed("DiLoCo", 1, 5, "end", away_s=4, fast=True)


@case("local: process 2 of 3 is killed before it gives its part of a share; the others share over two, their own again")
def _() -> None:
    again(*(killed("reset", 2, 6, "share", again=False) for _ in range(2)))


@case("local: process 0 of 3 is killed in a share, and comes back: it is not in that mean")
def _() -> None:
    killed("local SGD", 0, 6, "share", stayed=1)


@case("local: process 1 of 3 is killed when the mean has come, before running statistics are shared")
def _() -> None:
    killed("local SGD", 1, 6, "mean", norm=True, again=False)


@case("local: process 1 of 3 is killed when one of the others has made a share and the other has not: it takes it")
def _() -> None:
    killed("fragments", 1, 6, "shared", [2, 6, "shared", "lost"], again=False)
    killed("local SGD", 1, 6, "shared", [2, 6, "shared", "lost"], again=False, norm=True)


@case("local: process 1 of 3 is killed while means are on their way, summed in a tree: they have come; twice the same")
def _() -> None:
    again(*(killed("streamed", 1, 7, "loss", again=False) for _ in range(2)))


@case("local: process 1 of 3 is killed while means are on their way, fast: one that has not come is of the others")
def _() -> None:
    killed("streamed", 1, 7, "loss", again=False, fast=True)


@case(
    "local: process 2 of 3 is killed while means are on their way, and comes back, and takes them with what all share"
)
def _() -> None:
    killed("streamed", 2, 6, "loss", fast=True)


@case("local: process 1 of 3 is killed before a mean is sent: it is of the others, and the one on its way comes")
def _() -> None:
    killed("streamed", 1, 6, "share", again=False)


@case("local: process 1 of 3 is killed as a mean has come, and one of the others has taken it, or none has")
def _() -> None:
    killed("streamed", 1, 7, "shared", [2, 7, "shared", "lost"], again=False)
    killed("streamed", 1, 9, "shared", [0, 9, "shared", "lost"], [2, 9, "shared", "lost"], again=False)


@case("local: processes 1 and 3 of 4 are killed in a row while means are on their way")
def _() -> None:
    killed("streamed", 1, 7, "loss", [3, 8, "loss", "SIGKILL"], again=False, count=4, fast=True)


@case("local: process 1 of 3 is killed when one of the others has applied an update and the other not: it applies it")
def _() -> None:
    said = killed("DiLoCo", 1, 8, "promised", [2, 8, "promised", "lost"], again=False, scaled=True)
    assert "update 9 is dealt over 2 of 3" in str(said[0]["heard"])


@case("local: process 1 of 3 is killed when nobody has applied an update yet: it is done anew")
def _() -> None:
    lost = [[number, 8, "promised", "lost"] for number in (0, 2)]
    said = killed("DiLoCo", 1, 8, "promised", *lost, again=False)
    assert "update 8 is dealt over 2 of 3" in str(said[0]["heard"])


@case("local: processes 1 and 3 of 4 are killed in a row, in a loss and in the share of the same update")
def _() -> None:
    killed("local SGD", 1, 6, "loss", [3, 6, "share", "SIGKILL"], missing=[(6, (3, 0))], again=False, count=4)


@case("local: process 2 of 3 is killed in an evaluation of what is shared; the others go on with their own")
def _() -> None:
    killed("fragments", 2, 5, "evaluate", away_s=3)


@case("local: process 1 of 3 is killed while all step together still; it comes back with all that they have")
def _() -> None:
    said = ran("DiLoCo", [1, 2, "loss", "SIGKILL"])
    compared(said, "DiLoCo", *[lambda update: [(n, 0) for n in range(COUNT)]] * 2)


@case("local: process 2 of 3 is frozen in a loss, and goes on with what all share when the others have")
def _() -> None:
    said = ran("DiLoCo", [2, 6, "loss", "SIGSTOP"], timeout_s=6)
    there = lives_of(said, 0)
    assert (2, 1) in there(UPDATES) and (2, 0) not in there(6), said
    compared(said, "DiLoCo", there, there)


@case("local: process 1 of 3 raises in a loss, and saves no part of what it alone holds; the others go on without it")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = ran("DiLoCo", [1, 7, "loss", "raise"], folder=folder, fails=1)
        assert "a bug of the user's" in said[1]["error"] and said[1]["update"] == 6, said
        assert "the newest checkpoint stands" in str(said[1]["heard"]), said
        assert not (Path(folder) / "run/emergency").exists()
        there = lives_of(said, 0)
        assert there(7) == [(0, 0), (2, 0)]
        compared({number: said[number] for number in (0, 2)}, "DiLoCo", there, there)


@case("local: process 1 of 3 runs out of memory in a loss, and does its own again, finer, while the others wait")
def _() -> None:
    said = ran("local SGD", [1, 5, "loss", "memory"], micro=2)
    compared(said, "local SGD", *[lambda update: [(n, 0) for n in range(COUNT)]] * 2)
    assert "ran out of memory" in str(said[1]["heard"])


@case("local: process 1 of 3 is killed while a checkpoint is being written; those that are left save their own")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = killed("local SGD", 1, 5, "loss", folder=folder, again=False, asynchronous=True, slow_save=0.7)
        assert "it is given up" in str(said[0]["heard"]), said
        step = Path(folder) / "run/checkpoints/step-00000004"
        assert json.loads((step / "manifest.json").read_text())["ranks"] == 2


@case("local: a run of 3 that has lost one is stopped, and goes on with 2, with 3 and with 1 from its checkpoint")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hits = [[1, 5, "loss", "SIGKILL"], [0, 7, "end", "stop"]]
        said = ran("DiLoCo", *hits, folder=folder, again=False)
        assert [one["update"] for one in said.values()] == [7, 7]
        before: list[Life] = [(0, 0), (2, 0)]
        for count, lives in ((2, before), (3, [*before, (3, 0)]), (1, before[:1])):
            shutil.copytree(Path(folder) / "run", Path(folder) / f"on-{count}")
            ends = ran("DiLoCo", folder=folder, count=count, resume=True, run=f"on-{count}")

            def there(update: int, lives: list[Life] = lives) -> list[Life]:
                return lives if update > 7 else before if update > 4 else [(0, 0), (1, 0), (2, 0)]

            compared(ends, "DiLoCo", there, there)
