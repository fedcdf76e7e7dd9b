"""Opens a run: its values, and the Python objects that they name. Nothing of the recipe is called."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evenstep.builders.options import (
    build_checkpointing,
    build_failures,
    build_logging,
    build_precision,
    build_training,
)
from evenstep.builders.pipeline import build_layout
from evenstep.builders.ranks import check_ranks
from evenstep.builders.schedule import build_lr_schedule
from evenstep.config.check import broken_rules
from evenstep.config.faults import refused_at
from evenstep.config.load import read
from evenstep.config.named import OpenRun, find_calls, with_paths
from evenstep.config.schema import Config
from evenstep.config.sources import Setting
from evenstep.config.target import importable
from evenstep.errors import ConfigError

_BUILDS = {
    "train": build_training,
    "train.precision": build_precision,
    "lr_schedule": build_lr_schedule,
    "checkpoint": build_checkpointing,
    "failures": build_failures,
    "log": build_logging,
    "parallel.pipeline": build_layout,
    "launch.ranks": check_ranks,
}


@contextmanager
def open_run(path: Path, settings: Sequence[Setting] = ()) -> Generator[OpenRun]:
    """Read the run of `path`, and keep its recipe importable inside the `with`.

    Args:
        settings: values over those of the file, the later the stronger: the environment's, then the command line's.

    Raises:
        ConfigError: with everything that is wrong.
    """
    config = read(path, settings)
    folder = path.resolve().parent
    recipe = folder / config.recipe
    faults = [*broken_rules(config), *_refused(config)]
    if not recipe.is_dir():
        raise ConfigError([*faults, f"`recipe` must be a folder, but there is no {recipe}; set `recipe` to one."])
    with importable(recipe):
        calls, unfit, causes = find_calls(config, recipe=recipe, folder=folder)
        if faults or unfit:
            raise ConfigError([*faults, *unfit]) from next(iter(causes), None)
        yield OpenRun(config=with_paths(config, calls), calls=calls, recipe=recipe.resolve())


def _refused(config: Config) -> list[str]:
    faults: list[str] = []
    for key, build in _BUILDS.items():
        try:
            with refused_at(key):
                build(config)
        except ConfigError as error:
            faults += error.faults
    return faults
