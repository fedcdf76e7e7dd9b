"""The run folder: its files that make a run complete, so that it can be resumed from the folder alone.

    config.toml    the run file with its overrides, written last: with it the folder is a run
    recipe/        the Python files that the run was built from

The trainer writes the rest: metrics, checkpoints, status. Data are not copied.
"""

import os
import shutil
from pathlib import Path
from shlex import quote

from tomli_w import dumps

from evenstep.checkpoint import Mirror, complete_checkpoints
from evenstep.config.load import OpenRun
from evenstep.config.run import RunConfig
from evenstep.config.target import loaded_from
from evenstep.errors import ArgumentError
from evenstep.events.files import replace_text, writing
from evenstep.files import replacing
from evenstep.parallel.rank_info import is_restarted

CONFIG = "config.toml"
RECIPE = "recipe"
BEGUN = {"resume": "never", "reset": "none"}  # how the run began
IN_ONE_PROCESS = {"parallel": "none", "launch": "none"}


def folder_of(config: RunConfig) -> Path:
    return Path(config.runs).expanduser() / config.name


def check_free(folder: Path) -> None:
    """Raise ArgumentError for a folder with something in it."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ArgumentError(
            f"the run folder {folder} exists already; nothing in it was changed. To continue that run: `evenstep "
            f"resume {quote(str(folder))}`; to train another: `--name ANOTHER`.",
            field="name",
        )


def has_saved(folder: Path, mirror: str | None) -> bool:
    return bool(complete_checkpoints(folder / "checkpoints")) or bool(mirror and Mirror(mirror, folder).steps())


def where_to_begin(resume: str, folder: Path, mirror: str | None) -> str:
    """The source of a run's first state: "never", "auto" (its newest checkpoint), or the path of another run.

    Ranks that were started again continue from their own checkpoints.

    Raises:
        ArgumentError: the folder, or the mirror, holds another run.
    """
    if is_restarted():
        return "auto" if resume == "never" or has_saved(folder, mirror) else resume
    if resume != "auto":
        check_free(folder)
    if mirror is not None and resume != "auto":
        Mirror(mirror, folder).check_unused()
    return resume


def find_config(folder: Path) -> Path:
    """The run file in a run folder; ArgumentError if there is none."""
    file = folder / CONFIG
    if not file.is_file():
        raise ArgumentError(f"{folder} must be the folder of a run, but has no {CONFIG}; give the folder of a run.")
    return file


def publish(run: OpenRun, folder: Path) -> None:
    """Write a run's settings and recipe into its folder: all files beside imported ones, as functions import later."""
    with writing(folder / RECIPE, then="start it again"):
        folder.mkdir(parents=True, exist_ok=True)
        if run.recipe != (folder / RECIPE).resolve():
            _copy_recipe(run.recipe, folder)
    replace_text(folder / CONFIG, dumps(run.tables))


def _copy_recipe(recipe: Path, folder: Path) -> None:
    with replacing(folder / RECIPE) as new:
        new.mkdir()
        for parent in {file.parent for file in loaded_from(recipe).values() if file.is_file()}:
            for file in filter(Path.is_file, parent.glob("*.py")):
                copy = new / file.relative_to(recipe)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
