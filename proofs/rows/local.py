"""Ranks that step alone: each method beside its definition in float64, killed in the midst of a period, beside ddp."""

import sys
import tempfile
from functools import cache, partial
from pathlib import Path

from rows.row import Row

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS / "usage"), str(TESTS / "faults")]


Alone = tuple[list[float], list[float], list[float], str]  # what the ranks share, its average, what one holds, a sha256


def defined(method: str, ranks: int, stages: int = 1) -> tuple[float, float]:
    """How far what ranks, or replicas in stages, share, its average, and what each holds, are from the definition."""
    from rows.alone import by_hand

    shared, average, held = by_hand(method, ranks)
    found = _trained(ranks * stages, method, stages=stages)[:ranks]
    pairs = [pair for ours, its, _, _ in found for pair in ((ours, shared), (its, average))]
    pairs += [(own, theirs) for (_, _, own, _), theirs in zip(found, held, strict=True)]
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)), 1e-12


def killed(method: str, ranks: int, *kills: int, scaled: bool = False, stages: int = 1) -> tuple[str, str]:
    """sha256 of the run whose ranks but the first are killed at each update, and of the undisturbed one.

    Args:
        scaled: whether each rank of the first has a loss scale of its own, which the other has not.
        stages: of each replica; `ranks` are those of all.
    """
    from launched import Failed, on_ranks

    from rows import alone

    with tempfile.TemporaryDirectory() as folder:
        for kill in kills:
            said = on_ranks(ranks, partial(alone.left, scaled=scaled, stages=stages), method, folder, kill)
            if isinstance(said[0], Failed) or "exit -9" not in said[1]:
                raise RuntimeError(f"rank 1 was to be killed at update {kill}, but the ranks said {said}")
        ended = _trained(ranks, method, folder, scaled=scaled, stages=stages)
        return ended[0][3], _undisturbed(method, ranks, stages)


def every_update(ranks: int, stages: int = 1) -> tuple[str, str]:
    """sha256 of ranks that share in each update, with outer SGD at rate 1, and of ddp with ordered sums."""
    from launched import on_ranks

    from rows import alone

    found = [on_ranks(ranks, partial(alone.every_update, alone=one, stages=stages)) for one in (True, False)]
    return " ".join(sorted(set(found[0]))), found[1][0]


def gone_on(settings: str) -> tuple[float, float]:
    """How far ranks of which one was killed in an update are from the definition over those that are left."""
    from lost_alone import far, lives_of, ran

    said = ran(settings, [1, 7, "loss", "SIGKILL"], again=False)
    there = lives_of(said, 0)
    assert len(there(7)) == 2, "nobody was lost"
    return far(said, settings, there, there), 1e-12


def gone_on_again() -> tuple[str, str]:
    """sha256 of what each rank holds after one was killed before it gave its part of a share; and a second time."""
    from lost_alone import ran

    one, two = (ran("DiLoCo", [2, 8, "share", "SIGKILL"], again=False) for _ in range(2))
    return " ".join(one[n]["sha256"] for n in sorted(one)), " ".join(two[n]["sha256"] for n in sorted(two))


@cache
def _undisturbed(method: str, ranks: int, stages: int) -> str:
    return _trained(ranks, method, stages=stages)[0][3]


def _trained(ranks: int, *arguments: str, scaled: bool = False, stages: int = 1) -> list[Alone]:
    from launched import Failed, on_ranks

    from rows import alone

    found = on_ranks(ranks, partial(alone.trained, scaled=scaled, stages=stages), *arguments)
    for one in found:
        if isinstance(one, Failed):
            raise RuntimeError(one)
    return found


METHODS = ("SGD", "SGD after updates together", "BMUF", "BMUF, Nesterov", "SlowMo", "DiLoCo", "streaming DiLoCo")
KILLED = (("SGD after updates together", (4, 11)), ("SlowMo", (11,)), ("streaming DiLoCo", (10, 14)))
ROWS = [
    *(
        Row(
            name=f"local {method}, {ranks} ranks",
            measure="max |a - b| of parameters and average, float64",
            run=partial(defined, method, ranks),
        )
        for method in METHODS
        for ranks in (2, 4)
    ),
    *(
        Row(
            name=f"local {method}, 2 replicas in 2 stages",
            measure="max |a - b| of parameters and average, float64",
            run=partial(defined, method, 2, 2),
        )
        for method in ("SGD after updates together", "DiLoCo", "streaming DiLoCo")
    ),
    Row(
        name="local streaming DiLoCo, 2 replicas in 2 stages, three ranks killed twice, resumed",
        measure="sha256 of all that training changes",
        run=partial(killed, "streaming DiLoCo", 4, 10, 14, stages=2),
    ),
    *(
        Row(
            name=f"local {method}, rank killed{' twice' if len(kills) > 1 else ''}, resumed",
            measure="sha256 of all that training changes",
            run=partial(killed, method, 2, *kills),
        )
        for method, kills in KILLED
    ),
    *(
        Row(
            name=f"local {method}, a loss scale on each rank, {said}",
            measure="sha256 of all that training changes, beside none",
            run=partial(killed, method, ranks, *kills, scaled=True),
        )
        for method, ranks, kills, said in (
            ("SGD after updates together", 4, (), "4 ranks"),
            ("streaming DiLoCo", 2, (10, 14), "rank killed twice, resumed"),
        )
    ),
    *(
        Row(
            name=f"local {settings}, 3 ranks, one lost and gone on without",
            measure="max |a - b| of parameters, float64",
            run=partial(gone_on, settings),
        )
        for settings in ("DiLoCo", "fragments")
    ),
    Row(
        name="local DiLoCo, 3 ranks, one lost in a share, ordered, a second time",
        measure="sha256 of all that training changes",
        run=gone_on_again,
    ),
    *(
        Row(
            name=f"local SGD in each update without rounding, {ranks} ranks",
            measure="sha256 of the parameters, beside ddp ordered",
            run=partial(every_update, ranks),
        )
        for ranks in (2, 4)
    ),
    Row(
        name="local SGD in each update without rounding, 2 replicas in 2 stages",
        measure="sha256 of the parameters, beside ddp ordered in these stages",
        run=partial(every_update, 4, 2),
    ),
]
