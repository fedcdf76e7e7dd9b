"""`evenstep report RUN_FOLDER... [--to FILE] [--follow]`: writes the page of one or several runs, or serves it."""

from pathlib import Path

from evenstep.errors import ConfigError
from evenstep.process import EXIT_DONE
from evenstep.tools.report.follow import follow_runs
from evenstep.tools.report.page import write_page
from evenstep.tools.report.read import is_run


def run(paths: list[Path], *, to: Path | None, follow: bool) -> int:
    """Write the page and print its path; or serve it until Ctrl-C."""
    if follow and to is not None:
        raise ConfigError("`--to` can't be given with `--follow`, which writes no file; leave one out.")
    folders = list(dict.fromkeys(paths))
    if len(folders) > 1:
        folders = _runs(folders)
    if follow:
        follow_runs(folders, lambda address: print(f"{address}  (Ctrl-C ends it)", flush=True))
    else:
        beside = folders[0] if len(folders) == 1 else folders[0].parent
        print(write_page(folders, to or beside / "report.html"))
    return EXIT_DONE


def _runs(folders: list[Path]) -> list[Path]:
    """Run folders among the paths: `runs/*` may name other files."""
    missing = [f"`{folder}` must be a run folder, but is not there." for folder in folders if not folder.exists()]
    found = [folder for folder in folders if is_run(folder)]
    if missing or not found:
        raise ConfigError(missing or [f"none of the {len(folders)} paths is a run folder."])
    others = [str(folder) for folder in folders if folder not in found]
    if others:
        print(f"no run, left out: {', '.join(others)}")
    return found
