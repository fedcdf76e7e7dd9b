"""Holds what the ranks have found against the table of optimizers and layouts."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import optimizers_programs as programs
from launched import Failed, on_ranks
from optimizers import CASES, LAYOUTS, Case, Layout

TIMEOUT_S = 900


def launched(ranks: int, program: Any, *args: Any) -> dict[Any, Any]:
    """What a program of `optimizers_programs` found; ranks that failed are an error."""
    results = on_ranks(ranks, program, *args, timeout_s=TIMEOUT_S)
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, Failed)]
    if failures:
        raise RuntimeError("; ".join(failures))
    return results[0]


@cache
def alone(names: tuple[str, ...]) -> dict[str, Any]:
    """What each optimizer comes to in one process."""
    found = launched(1, programs.battery, names, ["single"])
    return {name: found[name, "single"] for name in names}


def faults(names: Sequence[str], layouts: Sequence[str]) -> list[str]:
    """Where the layouts, all of as many ranks, do not hold what the table says of these optimizers."""
    [ranks] = {LAYOUTS[layout].ranks for layout in layouts}
    wanted = alone(tuple(names))
    names = [name for name in names if any(CASES[name].outcome(LAYOUTS[layout]) != "-" for layout in layouts)]
    found = (
        launched(ranks, programs.battery, names, layouts) if ranks > 1 else {(n, "single"): wanted[n] for n in names}
    )
    told = {key: fault(CASES[key[0]], LAYOUTS[key[1]], value, wanted[key[0]]) for key, value in found.items()}
    return [f"{name}, {layout}: {what}" for (name, layout), what in told.items() if what]


def fault(case: Case, layout: Layout, found: Any, alone: Any) -> str:
    """What is not as the table says, or ""."""
    kind, through, again = found
    outcome = case.outcome(layout)
    if outcome == "-":
        return ""
    if kind == "failed":
        return through
    if kind == "refused" or outcome == "refused":
        return "" if kind == outcome else f"was to be {outcome}, but {kind if kind == 'ran' else through}"
    wanted = alone[1]
    if outcome == "bits" and through[:2] != wanted[:2]:
        return f"other bits than one process, {largest(through[2], wanted[2]):.1e} apart"
    if largest(through[2], wanted[2]) > 1e-6:
        return f"{largest(through[2], wanted[2]):.1e} from one process"
    return "" if again == through else f"resumed, {largest(again[2], through[2]):.1e} from the run through"


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of numbers."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def lost_on_the_way(names: Sequence[str], moves: Sequence[tuple[str, str]]) -> list[str]:
    """Which optimizers do not go on with the bits of one process where they are stopped on one layout of two ranks.

    Args:
        names: of optimizers.
        moves: from which layout to which.
    """
    wanted = alone(tuple(names))
    found = launched(2, programs.moved, names, moves)
    return [f"{key}: {value[1]}" for key, value in found.items() if value[:2] != wanted[key[0]][1][:2]]
