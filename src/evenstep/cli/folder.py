"""The run folder: taken for a new run, and made such that the run can go on from it alone.

    config.toml         the resolved configuration, written last: with it the folder is a run
    recipe/             the Python files that the run was built from
    .copied-from        where they were
    defaults.toml       what it would say of the same keys if none had been set
    environment.json    versions and hardware

The rest of the folder (metrics, checkpoints, status, report) is written by those who know it. Data are not copied.
"""

import json
import os
import shutil
from pathlib import Path
from shlex import quote

from evenstep.checkpoint import Mirror, complete_checkpoints
from evenstep.config.defaults import defaults_of
from evenstep.config.named import OpenRun
from evenstep.config.schema import Config
from evenstep.config.target import loaded_from
from evenstep.config.toml import dumps
from evenstep.errors import ArgumentError, ConfigError
from evenstep.events.files import replace_text, writing
from evenstep.events.start import describe_environment
from evenstep.parallel.rank_info import is_launched, is_restarted

CONFIG = "config.toml"
DEFAULTS = "defaults.toml"
RECIPE = "recipe"
NEW_RECIPE = ".recipe.new"
ORIGIN = ".copied-from"
ENVIRONMENT = "environment.json"
OWN = ("name", "runs", "resume", "reset")  # where a run is and that it goes on: said by who names its folder
BEGUN = {"resume": "never", "reset": "none"}  # how the run began, which it does not again
IN_ONE_PROCESS = {"parallel": "none", "launch": "none", "failures.lost_rank": "none"}  # whatever it was trained on


def folder_of(config: Config) -> Path:
    return Path(config.runs).expanduser() / config.name


def check_free(folder: Path) -> None:
    """Raise ArgumentError if there is something in `folder` already."""
    if not os.path.lexists(folder):  # as of a name that cannot be, which is told later
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ArgumentError(
            f"the run folder {folder} exists already, and nothing in it was touched. To go on with that run: `evenstep "
            f"resume {quote(str(folder))}`; to keep it and train another: `--name ANOTHER`; to start over: delete the "
            f"folder first."
        )


def has_saved(folder: Path, mirror: str | None) -> bool:
    return bool(complete_checkpoints(folder / "checkpoints")) or bool(mirror and Mirror.of_run(mirror, folder).steps())


def where_to_begin(resume: str, folder: Path, mirror: str | None) -> str:
    """What a run begins from: for ranks that are started again, what they have saved before, if anything.

    Args:
        resume: what the run asks for: "never", "auto", or a path.
        mirror: where its checkpoints are copied to, if anywhere.

    Raises:
        ArgumentError: the folder is used, or can't be; so for the mirror.
        CheckpointError: the mirror can't be used. Ranks that were started by a launcher only look into it: the trainer
            tries it when it takes the folder, as it does before each run.
    """
    if is_restarted():
        return "auto" if resume == "never" or has_saved(folder, mirror) else resume
    if resume != "auto":
        check_free(folder)
    if mirror is not None:
        copies = Mirror.of_run(mirror, folder)
        if not is_launched():
            copies.check()
        if resume != "auto":
            copies.check_unused()
    return resume


def find_config(folder: Path) -> Path:
    """The configuration of the run in `folder`.

    Raises:
        ArgumentError: there is no run, or its file is empty (a ConfigError).
    """
    if not (folder / CONFIG).is_file():
        raise ArgumentError(f"{folder} must be the folder of a run, but has no {CONFIG}; give the folder of a run.")
    if not (folder / CONFIG).read_bytes().strip(b"\0\n "):
        raise ConfigError([f"{folder / CONFIG} is empty; go on by `evenstep train RUN.toml --resume auto`."])
    return folder / CONFIG


def publish(run: OpenRun, folder: Path) -> None:
    """Write what the run needs to be run again into `folder`, after everything of the recipe was imported.

    Every Python file beside an imported one is copied, because functions may import later.

    Raises:
        EvenstepError: it can't be written.
    """
    with writing(folder / RECIPE, then="start it again"):
        folder.mkdir(parents=True, exist_ok=True)
        if run.recipe != (folder / RECIPE).resolve():
            _copy_recipe(run.recipe, folder)
    replace_text(folder / ENVIRONMENT, json.dumps(describe_environment(), indent=2) + "\n")
    replace_text(folder / DEFAULTS, dumps(defaults_of(run.config)))
    replace_text(folder / CONFIG, dumps(run.resolved()))


def texts_of(folder: Path) -> list[Path]:
    """The files that `publish` writes of the run's settings, where they are there already."""
    return [file for name in (ENVIRONMENT, DEFAULTS, CONFIG) if (file := folder / name).is_file()]


def origin_of_recipe(folder: Path) -> Path | None:
    """The folder that the recipe of the run in `folder` was copied from; None if that is not there any more."""
    said = folder / ORIGIN
    origin = Path(said.read_text(encoding="utf-8", errors="replace").strip()) if said.is_file() else None
    return origin if origin is not None and origin.is_dir() else None


def _copy_recipe(recipe: Path, folder: Path) -> None:
    beside = folder / NEW_RECIPE
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for parent in {file.parent for file in loaded_from(recipe).values() if file.is_file()}:
        for file in filter(Path.is_file, parent.glob("*.py")):  # what else has such a name, nothing has imported
            copy = beside / file.relative_to(recipe)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    replace_text(folder / ORIGIN, f"{recipe}\n")
    if (folder / RECIPE).exists():
        shutil.rmtree(folder / RECIPE)
    beside.replace(folder / RECIPE)
