"""`evenstep report RUN_FOLDER... [--to FILE] [--follow]`: writes the page of one or several runs, or serves it."""

from pathlib import Path

from evenstep.errors import ConfigError
from evenstep.process import EXIT_DONE
from evenstep.tools.report.follow import follow_runs
from evenstep.tools.report.page import write_page
from evenstep.tools.report.run import is_run


def run(paths: list[Path], *, to: Path | None, follow: bool) -> int:
    """Write the page and say where it is; or serve it until Ctrl-C."""
    if follow and to is not None:
        raise ConfigError(["`--to` can't be given with `--follow`, which writes no file; leave one out."])
    folders = _runs(paths)
    if follow:
        follow_runs(folders, lambda address: print(f"{address}  (Ctrl-C ends it)", flush=True))
    else:
        print(write_page(folders, to if to is not None else _where(folders)))
    return EXIT_DONE


def _runs(paths: list[Path]) -> list[Path]:
    folders = list(dict.fromkeys(paths))
    if len(folders) == 1:
        return folders
    missing = [folder for folder in folders if not folder.exists()]
    if missing:
        raise ConfigError([f"`{folder}` must be a run folder, but is not there; leave it out." for folder in missing])
    found = [folder for folder in folders if is_run(folder)]
    if not found:
        raise ConfigError(
            [f"none of the {len(folders)} paths is a run folder; give those that `evenstep train` printed."]
        )
    others = [str(folder) for folder in folders if folder not in found]
    if others:
        print(f"no run, left out: {', '.join(others)}")
    return found


def _where(folders: list[Path]) -> Path:
    return (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
