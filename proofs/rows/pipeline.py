"""The same run with its model in stages over several ranks: one sha256 with the sequential plan on one process."""

import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from rows.ranks import started
from rows.row import Row

SCRIPT = Path(__file__).with_name("staged.py")
UPDATES = 30

# ranks, of which in one pipeline, pipeline schedule, stages per rank (0: its own), how replicas share
Layout = tuple[int, int, str, int, str]
ALONE: Layout = (1, 1, "sequential", 1, "ddp")


def run(folder: Path, case: str, layout: Layout, updates: int = UPDATES) -> str:
    ranks, pipeline, schedule, stages, sharing = layout
    arguments = [str(folder), case, str(pipeline), schedule, str(stages), str(updates), sharing]
    return started([str(SCRIPT), *arguments], ranks)


@cache
def alone(case: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), case, ALONE)


def piped(case: str, layout: Layout) -> tuple[str, str]:
    """sha256 of the run in a pipeline, and on one process."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), case, layout), alone(case)


def moved(ways: Sequence[Layout], case: str = "tied") -> tuple[str, str]:
    """sha256 of a run that is stopped and resumed on each layout in turn, and of one process straight."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [UPDATES * (place + 1) // len(ways) for place in range(len(ways))]
        printed = [run(Path(folder), case, layout, end) for layout, end in zip(ways, ends, strict=True)]
        return printed[-1], alone(case)


WAYS: dict[str, tuple[str, Layout]] = {
    **{
        f"{ranks} × {schedule}": ("chain", (ranks, ranks, schedule, 0, "ddp"))
        for ranks in (2, 4)
        for schedule in ("1f1b", "interleaved", "zb_v")
    },
    "2 × 1f1b × 2 replicas": ("chain", (4, 2, "1f1b", 0, "ddp")),
    "2 × 1f1b × fsdp 2": ("chain", (4, 2, "1f1b", 0, "fsdp")),
    "2 × zb_v × fsdp 2, tied embeddings": ("tied", (4, 2, "zb_v", 0, "fsdp")),
    "2 × 1f1b × zero1 2": ("chain", (4, 2, "1f1b", 0, "zero1")),
    "2 × 1f1b, encoder-decoder": ("encoder-decoder", (2, 2, "1f1b", 0, "ddp")),
    "4 × 1f1b, tied embeddings": ("tied", (4, 4, "1f1b", 0, "ddp")),
    "2 × 1f1b of a plain model": ("plain", (2, 2, "1f1b", 0, "ddp")),
    "2 × interleaved × 2 replicas of a plain model": ("plain", (4, 2, "interleaved", 0, "ddp")),
    "2 × 1f1b, ragged lengths": ("ragged", (2, 2, "1f1b", 0, "ddp")),
}
RESUMED: list[Layout] = [(2, 2, "1f1b", 0, "ddp"), (4, 4, "interleaved", 0, "ddp"), ALONE]
PLAIN: list[Layout] = [ALONE, (2, 2, "1f1b", 0, "ddp"), (2, 1, "sequential", 0, "ddp")]
SHARED: list[Layout] = [
    (4, 2, "1f1b", 0, "fsdp"),
    ALONE,
    (4, 4, "1f1b", 0, "ddp"),
    (4, 2, "interleaved", 0, "zero1"),
    (4, 1, "sequential", 0, "fsdp"),
]

SHA = "sha256 of all that training changes"
ROWS = [
    *(Row(name=f"pipeline {name}", measure=SHA, run=partial(piped, *layout)) for name, layout in WAYS.items()),
    Row(name="pipeline resumed on 2, 4 interleaved, none", measure=SHA, run=partial(moved, RESUMED)),
    Row(
        name="pipeline of a plain model resumed whole, on 2, on 2 replicas",
        measure=SHA,
        run=partial(moved, PLAIN, "plain"),
    ),
    Row(name="pipeline resumed on 2 × fsdp 2, none, 4, 2 × zero1 2, fsdp 4", measure=SHA, run=partial(moved, SHARED)),
]
