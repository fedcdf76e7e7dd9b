"""Ranks that step alone: each method beside its definition in float64, killed in the midst of a period, beside ddp."""

import sys
import tempfile
from functools import cache, partial
from pathlib import Path

from rows.row import Row

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "usage"))


Alone = tuple[list[float], list[float], str]  # what the ranks share, what one holds, a sha256 of all


def defined(method: str, ranks: int) -> tuple[float, float]:
    """How far what ranks share, and what each holds, are from the definition."""
    from rows.alone import by_hand

    shared, held = by_hand(method, ranks)
    found = _trained(ranks, method)
    pairs = [(ours, shared) for ours, _, _ in found]
    pairs += [(own, theirs) for (_, own, _), theirs in zip(found, held, strict=True)]
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)), 1e-12


def killed(method: str, ranks: int, *kills: int) -> tuple[str, str]:
    """sha256 of the run whose ranks but the first are killed at each update, and of the undisturbed one."""
    from launched import Failed, on_ranks

    from rows import alone

    with tempfile.TemporaryDirectory() as folder:
        for kill in kills:
            said = on_ranks(ranks, alone.left, method, folder, kill)
            if isinstance(said[0], Failed) or "exit -9" not in said[1]:
                raise RuntimeError(f"rank 1 was to be killed at update {kill}, but the ranks said {said}")
        return _trained(ranks, method, folder)[0][2], _undisturbed(method, ranks)


def every_update(ranks: int) -> tuple[str, str]:
    """sha256 of ranks that share in each update, with outer SGD at rate 1, and of ddp with ordered sums."""
    from launched import on_ranks

    from rows import alone

    found = [on_ranks(ranks, partial(alone.every_update, alone=one)) for one in (True, False)]
    return " ".join(sorted(set(found[0]))), found[1][0]


@cache
def _undisturbed(method: str, ranks: int) -> str:
    return _trained(ranks, method)[0][2]


def _trained(ranks: int, *arguments: str) -> list[Alone]:
    from launched import Failed, on_ranks

    from rows import alone

    found = on_ranks(ranks, alone.trained, *arguments)
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
            measure="max |a - b| of parameters, float64",
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
            name=f"local SGD in each update without rounding, {ranks} ranks",
            measure="sha256 of the parameters, beside ddp ordered",
            run=partial(every_update, ranks),
        )
        for ranks in (2, 4)
    ),
]
