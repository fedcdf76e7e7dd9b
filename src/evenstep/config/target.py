"""Opens a run: its values, and the Python objects that they name, with their arguments checked. Nothing is called.

A target is `FILE.py:NAME`, the file within the recipe's folder, or `package.module:NAME`; the former is the module
that Python would find in that folder, so files of a recipe import each other as usual.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast, final

from pydantic import ValidationError

from evenstep.arguments import advice
from evenstep.config.load import Setting, Tree, as_json, at, faults_of, quoted, read
from evenstep.config.ranks import build_layout, check_ranks
from evenstep.config.run import HOOKS, RunConfig, Target
from evenstep.errors import ArgumentError, ConfigError, clause
from evenstep.process import user_line
from evenstep.schema import arguments_table


@contextmanager
def importable(folder: Path) -> Generator[None]:
    """Make the Python files of `folder` importable inside the `with`, without byte code; then they are forgotten."""
    entry, silent = str(folder.resolve()), sys.dont_write_bytecode
    sys.path.insert(0, entry)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = silent
        sys.path.remove(entry)
        for name in loaded_from(folder):
            del sys.modules[name]


def loaded_from(folder: Path) -> dict[str, Path]:
    """The files of the modules that were found through `folder`, by module name."""
    inside = folder.resolve()
    found: dict[str, Path] = {}
    for name, module in list(sys.modules.items()):
        stem = Path(inside, *name.split("."))
        file: str | None = getattr(module, "__file__", None)
        if file is not None and Path(file) in (stem.with_suffix(".py"), stem / "__init__.py"):
            found[name] = Path(file)
        elif file is None and str(stem) in [str(one) for one in getattr(module, "__path__", ())]:
            found[name] = stem  # a folder without `__init__.py`
    return found


def find(target: str, folder: Path) -> Callable[..., Any]:
    """The class or function that `target` names, from the recipe's importable folder; its module is imported.

    Raises:
        ArgumentError: there is no such object; the message goes on after the key's name.
    """
    place, _, name = target.partition(":")
    if place.endswith(".py"):
        file = Path(os.path.normpath(folder.resolve() / place))  # a link in the folder is a file of the recipe
        if not file.is_relative_to(folder.resolve()) or not file.is_file():
            others = [str(other.relative_to(folder)) for other in sorted(folder.glob("*.py"))]
            raise ArgumentError(f"names the file {place}, but the folder {folder} has none; {advice(place, others)}")
        module = _load(place, ".".join(file.relative_to(folder.resolve()).with_suffix("").parts))
        if Path(str(module.__file__)) != file:
            raise ArgumentError(f"names the file {place}, but Python has another module of that name; rename the file.")
    else:
        module = _load(place, place)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [other for other in vars(found) if not other.startswith("_")]
            raise ArgumentError(f'is "{target}", but {place} has no `{part}`; {advice(part, names)}')
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f'must name a class or function, but "{target}" is {quoted(found)}.')
    return found


def _load(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        where = user_line(error)
        at = f" (raised at {where})" if where else ""
        raise ArgumentError(f"can't be imported: {place} raises {clause(error)}{at}.") from error


@final
@dataclass(frozen=True, slots=True)
class Call:
    """A target with its arguments, converted to what its signature asks for."""

    function: Callable[..., Any]
    arguments: Mapping[str, object]

    def __call__(self, *given: object, **more: object) -> Any:
        return self.function(*given, **self.arguments, **more)


def bind(
    key: str,
    function: Callable[..., Any],
    args: Mapping[str, Any],
    folder: Path,
    *,
    at: str | None = None,
    num_given: int = 0,
    named: Sequence[str] = (),
) -> tuple[Call, list[str]]:
    """Check `args` against the signature of `function` and convert them: lists to tuples, text to paths, tables to
    dataclasses; gives the call and the faults.

    Args:
        key: of the target.
        folder: base of relative paths.
        at: key of the table with the arguments; `KEY.args` by default.
        num_given: positional arguments that the engine gives, and `named` keyword arguments.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[num_given:]
    except ValueError:  # some built-in classes don't have one
        return Call(function, args), []
    known = {one.name: one for one in parameters}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    missing = [name for name in named if name not in known and not takes_any]
    faults = [f"`{key}` must take an argument `{name}`, but does not." for name in missing]
    own = [one for one in parameters if one.name not in named]
    inside = (f"{key}.args" if at is None else at).split(".")
    try:
        made = arguments_table(function, own).validate_json(as_json(args), strict=True)
    except ValidationError as error:
        names = [one.name for one in own if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        wrong = faults_of(
            error, args, inside=inside, advise=lambda path: advice(path[-1], names if path[:-1] == inside else [])
        )
        return Call(function, args), [*faults, *wrong]
    for name, value in made.items():
        if isinstance(value, Path):
            made[name] = (folder / value.expanduser()).resolve()
    return Call(function, made), faults


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run without faults.

    Args:
        tables: its run file with its overrides; paths are absolute.
        calls: the objects that the run file names, ready to be called, by their keys, such as `data.train`.
        recipe: the folder of the recipe's Python files, importable while the run is open.
    """

    config: RunConfig
    tables: Tree
    calls: Mapping[str, Call]
    recipe: Path

    def resolved(self) -> Tree:
        """The run file as plain tables with its overrides, as a run folder keeps it."""
        return {**self.tables, "recipe": "recipe"}

    def plain(self) -> Tree:
        """The same in values that JSON has, which checkpoints keep."""
        return cast("Tree", json.loads(json.dumps(self.resolved(), default=str)))


@contextmanager
def open_run(path: Path, settings: Sequence[Setting] = ()) -> Generator[OpenRun]:
    """Read the run of `path`, and keep its recipe importable inside the `with`.

    Args:
        settings: values over those of the file, the later the stronger: the environment's, then the command line's.

    Raises:
        ConfigError: with everything that is wrong.
    """
    config, tables = read(path, settings)
    folder = path.resolve().parent
    recipe = folder / config.recipe
    faults = list(config.faults())
    for check in (build_layout, check_ranks):
        try:
            check(config)
        except ConfigError as error:
            faults += error.faults
    if not recipe.is_dir():
        raise ConfigError([*faults, f"`recipe` must be a folder, but there is no {recipe}; set `recipe` to one."])
    calls: dict[str, Call] = {}
    cause: BaseException | None = None
    with importable(recipe):
        for key, place, target, args, more in _named(config):
            try:
                found = find(target, recipe)
            except ArgumentError as error:
                faults.append(f"`{place}` {error}")
                cause = cause or error.__cause__
                continue
            if key.startswith("optimizer") and config.optimizer.is_divided and not isinstance(found, type):
                faults.append(f"`{place}` must name a class, as there are groups, but names a function.")
            calls[key], wrong = bind(key, found, args, folder, **more)
            faults += wrong
        if faults:
            raise ConfigError(faults) from cause
        for key, call in calls.items():
            paths = {name: str(value) for name, value in call.arguments.items() if isinstance(value, Path)}
            if paths:
                table = at(tables, key.split("."))
                (table if "use" in table else table["args"]).update(paths)
        yield OpenRun(config=config, tables=tables, calls=calls, recipe=recipe.resolve())


def _named(config: RunConfig) -> Iterator[tuple[str, str, str, Mapping[str, Any], dict[str, Any]]]:
    """Objects that a run file names: key, key of the name, target, arguments, options of `bind`."""
    for key, table in _targets(config):
        yield key, f"{key}.target", table.target, table.args, {}
    for number, hook in enumerate(config.hooks):
        key = f"hooks.{number}"
        named, at = ("use", {"at": key}) if hook.target is None else ("target", {})
        yield key, f"{key}.{named}", hook.target or HOOKS[str(hook.use)], hook.args, at
    for key, table in config.sets.items():
        if table.collate is not None:
            yield f"{key}.collate", f"{key}.collate", table.collate, {}, {"num_given": 1}
    whole = config.optimizer
    given = {"num_given": 1, "named": ("lr",)}
    for name, group in {"": whole, **whole.groups}.items():
        key = f"optimizer.groups.{name}" if name else "optimizer"
        own = group if group.name or group.target else whole
        place = "target" if own.target else "name"
        yield key, f"{key}.{place}", own.target or f"torch.optim:{own.name}", group.args, given


def _targets(value: object, key: str = "") -> Iterator[tuple[str, Target]]:
    if isinstance(value, Target):
        yield key, value
    inner: list[tuple[object, object]] = []
    if is_dataclass(value) and type(value).__module__ == RunConfig.__module__:
        inner = [(one.name, getattr(value, one.name)) for one in fields(value)]
    elif isinstance(value, dict):
        inner = list(cast("dict[object, object]", value).items())
    elif isinstance(value, tuple):
        inner = list(enumerate(cast("tuple[object, ...]", value)))
    for name, one in inner:
        yield from _targets(one, f"{key}.{name}".removeprefix("."))
