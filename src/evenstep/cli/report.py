"""`evenstep report RUN_FOLDER`: writes the page of a run."""

from pathlib import Path

from evenstep.extras.report import write_report


def run(path: str, settings: list[str]) -> int:
    """Write the page and say where it is."""
    assert not settings, "the command line takes none"
    print(write_report(Path(path)))
    return 0
