"""Reads a run: file, environment and command line, checked as a whole, with every fault reported at once.

It goes from values by themselves, to values between each other, to the Python objects that they name. What is wrong
in one place does not hide what is wrong in another, but what only follows from it is not said. It builds nothing.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from pydantic import ValidationError

from evenstep.config.check import broken_rules
from evenstep.config.faults import Fault, RankInfo, from_validation
from evenstep.config.keys import locate, tables
from evenstep.config.named import Calls, find_calls
from evenstep.config.schema import Config
from evenstep.config.sources import Setting, Tree, merge, read_file
from evenstep.config.target import importable
from evenstep.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A configuration without faults.

    Args:
        config: the values.
        calls: the objects that the configuration names, with their arguments, ready to be called.
        recipe: the folder of the recipe's Python files, importable while the run is open.
    """

    config: Config
    calls: Calls
    recipe: Path

    def resolved(self) -> Tree:
        """The configuration as plain tables, defaults and overrides included, paths absolute.

        It is what a run folder keeps: run from there, it finds the recipe's copy in `recipe`.
        """
        return cast("Tree", _without_empty({**self.config.model_dump(exclude_none=True), "recipe": "recipe"}))


@contextmanager
def open_run(path: Path, settings: Sequence[Setting] = ()) -> Generator[Run]:
    """Read the run of `path`, and keep its recipe importable inside the `with`.

    Args:
        path: of the TOML file.
        settings: values over those of the file, the later the stronger: the environment's, then the command line's.

    Raises:
        ConfigError: with everything that is wrong.
    """
    tree, misplaced = merge(read_file(path), settings)
    config, invalid = _validate(tree, settings)
    faults = [Fault(about=(), text=text) for text in misplaced] + invalid

    def report(found: Sequence[Fault]) -> None:
        faults.extend(fault for fault in found if not any(fault.follows_from(other) for other in invalid))

    report(broken_rules(config))
    folder = path.resolve().parent
    recipe = folder / config.recipe
    if not recipe.is_dir():
        text = f'`recipe` must be a folder, relative to {folder}, but is "{config.recipe}"; there is no such folder.'
        raise ConfigError([*(fault.text for fault in faults), text])
    with importable(recipe):
        calls, unfit, causes = find_calls(config, recipe=recipe, folder=folder)
        report(unfit)
        if faults:
            raise ConfigError([fault.text for fault in faults]) from next(iter(causes), None)
        yield Run(config=_with_paths(config, calls), calls=calls, recipe=recipe.resolve())


def _validate(tree: Tree, settings: Sequence[Setting]) -> tuple[Config, list[Fault]]:
    """The values, and what is wrong with them by themselves; where something is, the rest is made to stand without."""

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
    rest = _left_out(tree, [place for place, fault in found if not fault.missing])
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
        _at(tree, path[:-1])[path[-1]] = texts[path]
    return bool(set(wanted) & texts.keys())


def _left_out(tree: Tree, places: Sequence[RankInfo]) -> Tree:
    """A copy of `tree` without what is at `places`."""
    rest = deepcopy(tree)
    paths = [locate(place)[0] for place in places]
    # the longer number is the larger: so lists lose their last elements first
    for path in sorted(paths, key=lambda path: [(len(key), key) for key in path], reverse=True):
        table = _at(rest, path[:-1])
        del table[int(path[-1]) if isinstance(table, list) else path[-1]]
    return rest


def _at(tree: Tree, path: Sequence[str]) -> Any:
    table: Any = tree
    for key in path:
        table = table[int(key) if isinstance(table, list | tuple) else key]
    return table


# what stands in for a missing value, so that the others can still be checked; nothing about it is reported
FILLINGS: Mapping[str, object] = {
    "name": "x",
    "target": "builtins:dict",
    "lr": 1.0,
    "metric": "valid/loss",
    "decay_updates": 0,
}


def _fill_in(tree: Tree, errors: ValidationError) -> None:
    for error in errors.errors():
        path, inside = locate(error["loc"])
        assert error["type"] == "missing", "everything that is wrong has been left out"
        annotation = inside[0].model_fields[path[-1]].annotation
        _at(tree, path[:-1])[path[-1]] = {} if tables(annotation) else FILLINGS[path[-1]]


def _with_paths(config: Config, calls: Calls) -> Config:
    """`config` with the relative paths among its arguments made absolute, so that it can be run from elsewhere."""
    values = config.model_dump()
    for call in calls.all():
        paths = {name: str(value) for name, value in call.arguments.items() if isinstance(value, Path)}
        if paths:
            _at(values, call.key.split("."))["args"] |= paths
    return Config.model_validate(values)


def _without_empty(value: object) -> object:
    if isinstance(value, dict):
        pruned = {key: _without_empty(inner) for key, inner in cast("Mapping[str, object]", value).items()}
        return {key: inner for key, inner in pruned.items() if inner not in ({}, [])}
    if isinstance(value, tuple | list):
        return [_without_empty(inner) for inner in cast("Sequence[object]", value)]
    return value
