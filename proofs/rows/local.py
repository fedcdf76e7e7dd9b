"""Ranks that step alone: each method beside its definition in float64, killed in the midst of a period, beside ddp."""

import sys
import tempfile
from functools import cache, partial
from pathlib import Path

from rows.row import Row

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "usage"))


Alone = tuple[list[float], list[float], list[float], str]  # what the ranks share, its average, what one holds, a sha256


def defined(method: str, ranks: int) -> tuple[float, float]:
    """How far what ranks share, its average, and what each holds, are from the definition."""
    from rows.alone import by_hand

    shared, average, held = by_hand(method, ranks)
    found = _trained(ranks, method)
    pairs = [pair for ours, its, _, _ in found for pair in ((ours, shared), (its, average))]
    pairs += [(own, theirs) for (_, _, own, _), theirs in zip(found, held, strict=True)]
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)), 1e-12


def killed(method: str, ranks: int, *kills: int, scaled: bool = False) -> tuple[str, str]:
    """sha256 of the run whose ranks but the first are killed at each update, and of the undisturbed one.

    Args:
        scaled: whether each rank of the first has a loss scale of its own, which the other has not.
    """
    from launched import Failed, on_ranks

    from rows import alone

    with tempfile.TemporaryDirectory() as folder:
        for kill in kills:
            said = on_ranks(ranks, partial(alone.left, scaled=scaled), method, folder, kill)
            if isinstance(said[0], Failed) or "exit -9" not in said[1]:
                raise RuntimeError(f"rank 1 was to be killed at update {kill}, but the ranks said {said}")
        return _trained(ranks, method, folder, scaled=scaled)[0][3], _undisturbed(method, ranks)


def every_update(ranks: int) -> tuple[str, str]:
    """sha256 of ranks that share in each update, with outer SGD at rate 1, and of ddp with ordered sums."""
    from launched import on_ranks

    from rows import alone

    found = [on_ranks(ranks, partial(alone.every_update, alone=one)) for one in (True, False)]
    return " ".join(sorted(set(found[0]))), found[1][0]


@cache
def _undisturbed(method: str, ranks: int) -> str:
    return _trained(ranks, method)[0][3]


def _trained(ranks: int, *arguments: str, scaled: bool = False) -> list[Alone]:
    from launched import Failed, on_ranks

    from rows import alone

    found = on_ranks(ranks, partial(alone.trained, scaled=scaled), *arguments)
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
            name=f"local SGD in each update without rounding, {ranks} ranks",
            measure="sha256 of the parameters, beside ddp ordered",
            run=partial(every_update, ranks),
        )
        for ranks in (2, 4)
    ),
]
