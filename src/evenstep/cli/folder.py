"""The run folder: its files that make a run complete, so that it can be resumed from the folder alone.

    config.toml         the resolved run file, written last: with it the folder is a run
    recipe/             the Python files that the run was built from
    .copied-from        the folder that they were copied from
    defaults.toml       the defaults of the keys in config.toml
    environment.json    versions and hardware

The trainer writes the rest: metrics, checkpoints, status. Data are not copied.
"""

import json
import os
import shutil
from pathlib import Path
from shlex import quote

from tomli_w import dumps

from evenstep.checkpoint import Mirror, complete_checkpoints
from evenstep.config.keys import defaults_of
from evenstep.config.run import RunConfig
from evenstep.config.target import OpenRun, loaded_from
from evenstep.errors import ArgumentError, ConfigError
from evenstep.events.files import replace_text, writing
from evenstep.events.hooks.status import describe_environment
from evenstep.files import replacing
from evenstep.parallel.rank_info import is_restarted

CONFIG = "config.toml"
RECIPE = "recipe"
ORIGIN = ".copied-from"
SETTINGS = ("environment.json", "defaults.toml", CONFIG)
OWN = ("name", "runs", "resume", "reset")  # given by the folder of a run, not by the environment
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

    Args:
        resume: the key `resume` of the run file.
        mirror: the place that checkpoints are copied to.

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
    """The run file in a run folder.

    Raises:
        ArgumentError: there is none.
        ConfigError: it is empty.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise ArgumentError(f"{folder} must be the folder of a run, but has no {CONFIG}; give the folder of a run.")
    if not file.read_bytes().strip(b"\0\n "):
        raise ConfigError(f"{file} is empty; continue with `evenstep train RUN.toml --resume auto`.")
    return file


def publish(run: OpenRun, folder: Path) -> None:
    """Write the settings of a run and a copy of its recipe into its folder.

    All Python files beside an imported one are copied, as functions may import later.

    Raises:
        EvenstepError: it can't be written.
    """
    with writing(folder / RECIPE, then="start it again"):
        folder.mkdir(parents=True, exist_ok=True)
        if run.recipe != (folder / RECIPE).resolve():
            _copy_recipe(run.recipe, folder)
    texts = (
        json.dumps(describe_environment(), indent=2) + "\n",
        dumps(defaults_of(run.tables)),
        dumps(run.resolved()),
    )
    for name, text in zip(SETTINGS, texts, strict=True):
        replace_text(folder / name, text)


def origin_of_recipe(folder: Path) -> Path | None:
    """The folder that the recipe in a run folder was copied from, if it still exists."""
    note = folder / ORIGIN
    if not note.is_file():
        return None
    origin = Path(note.read_text(encoding="utf-8", errors="replace").strip())
    return origin if origin.is_dir() else None


def _copy_recipe(recipe: Path, folder: Path) -> None:
    with replacing(folder / RECIPE) as new:
        new.mkdir()
        for parent in {file.parent for file in loaded_from(recipe).values() if file.is_file()}:
            for file in filter(Path.is_file, parent.glob("*.py")):
                copy = new / file.relative_to(recipe)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        replace_text(folder / ORIGIN, f"{recipe}\n")
