"""Reads the values of a run, from file, environment and command line; types and bounds of each are checked."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from evenstep.config.faults import invalid_values
from evenstep.config.keys import locate
from evenstep.config.schema import Config
from evenstep.config.sources import Setting, Tree, at, merge, read_file
from evenstep.errors import ConfigError


def read(path: Path, settings: Sequence[Setting]) -> Config:
    """The values of a run.

    Args:
        settings: values over those of the file, the later the stronger.

    Raises:
        ConfigError: the file can't be read, or with a sentence for each value that is wrong.
    """
    tree, misplaced = merge(read_file(path), settings)

    def origin(key: Sequence[str]) -> str:
        setters = [one for one in settings if one.path[: len(key)] == tuple(key[: len(one.path)])]
        return f" (set by {setters[-1].origin})" if setters else ""

    error = _error(tree)
    if error is not None and _retype(tree, error, settings):
        error = _error(tree)
    faults = [*misplaced, *([] if error is None else invalid_values(error, origin))]
    if faults:
        raise ConfigError(faults)
    return Config.model_validate(tree)


def _error(tree: Tree) -> ValidationError | None:
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return error
    return None


def _retype(tree: Tree, error: ValidationError, settings: Sequence[Setting]) -> bool:
    texts = {setting.path: setting.text for setting in settings}
    wanted = {locate(detail["loc"])[0] for detail in error.errors() if detail["type"] == "string_type"}
    for path in wanted & texts.keys():
        at(tree, path[:-1])[path[-1]] = texts[path]
    return bool(wanted & texts.keys())
