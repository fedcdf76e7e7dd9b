"""Whether a run has trained in a folder already: another one would erase its metrics and mix up its checkpoints.

A run that failed before its first update has left nothing that counts. Who may go on in the folder is the run's to say.
"""

from pathlib import Path

from evenstep.checkpoint.layout import CHECKPOINTS, complete_checkpoints, step_update
from evenstep.checkpoint.parts import EMERGENCY

_METRICS = ("metrics.jsonl", "metrics.csv")


def trained_before(folder: Path) -> str:
    """What a run has left in the run folder `folder`, in words; "" where nothing is.

    Raises:
        CheckpointError: a folder that cannot be listed.

    >>> trained_before(Path("runs/none"))
    ''
    """
    saved = [path for path in complete_checkpoints(folder / CHECKPOINTS) if step_update(path.name)]
    if saved:
        return f"checkpoints up to {saved[-1].name}"
    if (folder / EMERGENCY).is_dir():
        return f"parts of a state in {EMERGENCY}"
    for name in _METRICS:
        file = folder / name
        if file.is_file() and _has_values(file):
            return f"metrics in {name}"
    return ""


def _has_values(file: Path) -> bool:
    with file.open("rb") as lines:
        heading = next(lines, b"")
        return bool(next(lines, b"")) or heading.startswith(b"{")
