"""Finds the Python objects that a run file names, and checks their arguments. Nothing is called.

A target is `FILE.py:NAME`, the file within the recipe's folder, or `package.module:NAME`; the former is the module
that Python would find in that folder, so files of a recipe import each other as usual.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from evenstep.arguments import advice
from evenstep.errors import ArgumentError, clause
from evenstep.process import user_line
from evenstep.schema import arguments_table, quoted


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


def bind(
    function: Callable[..., Any],
    args: Mapping[str, Any],
    folder: Path,
    *,
    num_given: int = 0,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Arguments converted to what the signature of `function` says: lists to tuples, texts to paths, tables to
    dataclasses; ValidationError if they don't fit.

    Args:
        folder: base of relative paths.
        num_given: number of positional arguments that the engine gives, and `without` the names of others.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()][num_given:]
    except ValueError:  # some built-in classes don't have one
        return {**args}
    own = [one for one in parameters if one.name not in without]
    names = [one.name for one in own if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unknown = [name for name in args if name not in names]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in own):
        raise ArgumentError(f"is unknown; {advice(unknown[0], names)}", field=unknown[0])
    made: dict[str, Any] = arguments_table(function, own).validate_json(json.dumps(args, default=str))
    for name, value in made.items():
        if isinstance(value, Path):
            made[name] = (folder / value.expanduser()).resolve()
    return made
