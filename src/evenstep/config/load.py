"""Reads the values of a run, from file, environment and command line; types and bounds of each are checked.

Whatever is wrong, it gives a whole configuration, so that the rest can be checked as well.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

from pydantic import ValidationError

from evenstep.config.faults import Fault
from evenstep.config.keys import locate, tables
from evenstep.config.schema import Config
from evenstep.config.sources import Setting, Tree, at, merge, read_file
from evenstep.config.validation import Location, from_validation


def read(path: Path, settings: Sequence[Setting]) -> tuple[Config, list[Fault]]:
    """The values of a run, and what is wrong with them by themselves; where something is, the rest stands without it.

    Args:
        settings: values over those of the file, the later the stronger.

    Raises:
        ConfigError: the file can't be read.
    """
    tree, misplaced = merge(read_file(path), settings)
    config, invalid = _validate(tree, settings)
    return config, [*(Fault(about=(), text=text) for text in misplaced), *invalid]


def _validate(tree: Tree, settings: Sequence[Setting]) -> tuple[Config, list[Fault]]:
    def origin(path: Sequence[str]) -> str:
        above = [setting for setting in settings if tuple(path[: len(setting.path)]) == setting.path]
        below = [setting for setting in settings if setting.path[: len(path)] == tuple(path)]
        return f" (set by {(above or below)[-1].origin})" if above or below else ""

    errors = _errors(tree)
    if errors is not None and _retype(tree, errors, settings):
        errors = _errors(tree)
    if errors is None:
        return Config.model_validate(tree), []
    found = from_validation(errors, origin)
    meant = [fault.meant for _, fault in found]
    faults = [fault for _, fault in found if not (fault.missing and fault.about[0] in meant)]
    rest = _left_out(tree, [location for location, fault in found if not fault.missing])
    while (errors := _errors(rest)) is not None:
        _fill_in(rest, errors)
    return Config.model_validate(rest), faults


def _errors(tree: Tree) -> ValidationError | None:
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return error
    return None


def _retype(tree: Tree, errors: ValidationError, settings: Sequence[Setting]) -> bool:
    """Take settings as text where text is wanted, such as `--name 2024`; whether there were any."""
    texts = {setting.path: setting.text for setting in settings}
    wanted = [locate(error["loc"])[0] for error in errors.errors() if error["type"] == "string_type"]
    for path in set(wanted) & texts.keys():
        at(tree, path[:-1])[path[-1]] = texts[path]
    return bool(set(wanted) & texts.keys())


def _left_out(tree: Tree, locations: Sequence[Location]) -> Tree:
    """A copy of `tree` without what is at `locations`."""
    rest = deepcopy(tree)
    paths = [locate(location)[0] for location in locations]
    # the longer number is the larger: so lists lose their last elements first
    for path in sorted(paths, key=lambda path: [(len(key), key) for key in path], reverse=True):
        table = at(rest, path[:-1])
        del table[int(path[-1]) if isinstance(table, list) else path[-1]]
    return rest


# what stands in for a missing value, so that the others can still be checked; nothing about it is reported
FILLINGS: Mapping[str, object] = {
    "name": "x",
    "target": "builtins:dict",
    "lr": 1.0,
    "metric": "valid/loss",
    "decay_updates": 0,
    "period_updates": 2,
    "every": 1,
    "factors": (1.0,),
    "patterns": ("*",),
    "path": "x",
    "first": 1,
    "last": 1,
}


def _fill_in(tree: Tree, errors: ValidationError) -> None:
    for error in errors.errors():
        path, inside = locate(error["loc"])
        assert error["type"] == "missing", "everything that is wrong has been left out"
        annotation = inside[0].model_fields[path[-1]].annotation
        at(tree, path[:-1])[path[-1]] = {} if tables(annotation) else FILLINGS[path[-1]]
