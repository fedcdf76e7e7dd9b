"""Every optimizer on every layout: the bits of one process, also resumed in the midst, or refused when it is built.

The table of optimizers and layouts is that of the tests (tests/usage/optimizers.py) and of the documentation. Here the
classes are proved on most layouts; their options, on all of them, are in the slow tests.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rows.row import Row

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "usage"))


def on_layout(layout: str) -> tuple[str, str]:
    """How many optimizers come to what the table says, of how many; the first few that do not are named."""
    from optimizers import CASES, LAYOUTS, PROVED
    from optimizers_judged import faults

    names = [name for name in PROVED if CASES[name].outcome(LAYOUTS[layout]) != "-"]
    return counted(faults(names, [layout]), len(names))


def moved(move: tuple[str, str]) -> tuple[str, str]:
    """How many optimizers, stopped on one layout, go on on the other with the bits of one process."""
    from optimizers import MOVABLE, PROVED
    from optimizers_judged import lost_on_the_way

    names = [name for name in MOVABLE if name in PROVED]
    return counted(lost_on_the_way(names, [move]), len(names))


def counted(faults: Sequence[str], number: int) -> tuple[str, str]:
    for fault in faults[:5]:
        print(f"    {fault}", file=sys.stderr)
    return f"{number - len(faults)} of {number}", f"{number} of {number}"


LAYOUTS = ("single", "ddp", "ordered", "zero1", "fsdp", "ordered-fsdp", "hybrid", "2 stages", "2 stages, fsdp")
MOVES = (("ordered", "ordered-zero1"), ("ordered-zero1", "ordered-fsdp"), ("2 stages", "ordered"))
ROWS = [
    *(
        Row(
            name=f"optimizers: {layout}",
            measure="with the bits of one process, or refused",
            run=partial(on_layout, layout),
        )
        for layout in LAYOUTS
    ),
    *(
        Row(
            name=f"optimizers: {' to '.join(move)}",
            measure="resumed with the bits of one process",
            run=partial(moved, move),
        )
        for move in MOVES
    ),
]
