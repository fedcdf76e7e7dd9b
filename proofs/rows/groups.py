"""Parameter groups: each parameter stepped as by an optimizer of its own; on ranks, in shards, in stages, killed."""

import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rows.row import Row

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "usage"))

# ranks, strategy, stages, samples of a micro-batch
Layout = tuple[int, str, int, int]
ALONE: Layout = (1, "ordered", 1, 2)
WAYS: dict[str, Layout] = {
    "micro-batches of 3": (1, "single", 1, 3),
    "2 ranks": (2, "ddp", 1, 2),
    "2 ranks with zero1": (2, "zero1", 1, 2),
    "2 ranks with fsdp": (2, "fsdp", 1, 2),
    "2 stages": (2, "ordered", 2, 2),
}
KILLED: dict[str, Layout] = {
    "": ALONE,
    " on 2 ranks with zero1": (2, "ordered-zero1", 1, 2),
    " in 2 stages": (2, "ordered", 2, 2),
}


SETTINGS = ("decay of matrices", "frozen, factors", "Muon and AdamW", "two schedules")


def refused(setting: str, layout: Layout) -> bool:
    """Muon looks at whole matrices, which shards lack."""
    _, strategy, _, _ = layout
    return "Muon" in setting and "fsdp" in strategy


def stepped(setting: str, layout: Layout) -> tuple[float, float]:
    """How far the parameters are from those of one optimizer each."""
    from rows.grouping import by_hand

    ours, theirs = _trained(layout)[setting][0], by_hand(setting)
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"there must be {sorted(theirs)}, but there are {sorted(ours)}")
    return max(abs(a - b) for name in theirs for a, b in zip(ours[name], theirs[name], strict=True)), 1e-12


def killed(setting: str, layout: Layout, kills: Sequence[int]) -> tuple[str, str]:
    """sha256 of the run whose last rank is killed at each update, and of the undisturbed one in one process."""
    from launched import Failed, on_ranks

    from rows import grouping

    ranks, strategy, stages, _ = layout
    with tempfile.TemporaryDirectory() as folder:
        for kill in kills:
            said = on_ranks(ranks, grouping.left, [setting], strategy, stages, folder, kill)
            if "exit -9" not in said[-1] or (ranks > 1 and isinstance(said[0], Failed)):
                raise RuntimeError(f"the last rank was to be killed at update {kill}, but the ranks said {said}")
        return _on_ranks(layout, [setting], folder)[0][1], _trained(ALONE)[setting][1]


@cache
def _trained(layout: Layout) -> dict[str, tuple[dict[str, list[float]], str]]:
    settings = [one for one in SETTINGS if not refused(one, layout)]
    return dict(zip(settings, _on_ranks(layout, settings), strict=True))


def _on_ranks(layout: Layout, settings: list[str], folder: str | None = None) -> Any:
    from launched import Failed, on_ranks

    from rows import grouping

    ranks, strategy, stages, size = layout
    first = on_ranks(ranks, grouping.trained, settings, strategy, stages, size, folder)[0]
    if isinstance(first, Failed):
        raise RuntimeError(first)
    return first


ROWS = [
    *(
        Row(
            name=f"groups: {setting}, {way}",
            measure="max |a - b| of parameters, float64",
            run=partial(stepped, setting, layout),
        )
        for setting in SETTINGS
        for way, layout in WAYS.items()
        if not refused(setting, layout)
    ),
    *(
        Row(
            name=f"groups: Muon and AdamW, killed twice{way}",
            measure="sha256 of all that training changes",
            run=partial(killed, "Muon and AdamW", layout, (4, 11)),
        )
        for way, layout in KILLED.items()
    ),
]
