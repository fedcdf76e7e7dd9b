"""Finds the Python objects that a run file names, and makes the recipe's files importable meanwhile.

A target is `FILE.py:NAME`, the file within the recipe's folder, or `package.module:NAME`; the former is the module
that Python would find in that folder, so files of a recipe import each other as usual. Nothing is called here.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from evenstep.arguments import advice
from evenstep.config.faults import quoted
from evenstep.errors import ArgumentError, MissingExtraError, clause
from evenstep.process import user_line

_DETOUR = re.compile(r"/\.{0,2}/")  # in a path that may begin otherwise than it says


@contextmanager
def importable(folder: Path) -> Generator[None]:
    """Make the Python files of `folder` importable inside the `with`; afterwards they are forgotten.

    No byte code is written meanwhile, so that looking at a recipe leaves nothing behind in it.
    """
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
    inside = str(folder.resolve())
    found: dict[str, Path] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and not file.startswith(inside) and not _DETOUR.search(file):
            continue  # thousands are: no path is made for each
        stem = Path(inside, *name.split("."))
        if file is None:
            # a folder without `__init__.py` is a module without a file: it must be forgotten as well
            if str(stem) in cast("list[str]", list(getattr(module, "__path__", ()))):
                found[name] = stem
        elif Path(file) in (stem.with_suffix(".py"), stem / "__init__.py"):
            found[name] = Path(file)
    return found


def find(target: str, folder: Path) -> Callable[..., Any]:
    """The object that `target` names. Its module is imported, which runs it.

    Args:
        target: `FILE.py:NAME` or `package.module:NAME`.
        folder: the recipe's, which is importable.

    Raises:
        ArgumentError: there is no such object; the message goes on after the key's name.
    """
    place, _, name = target.partition(":")
    if place.endswith(".py"):
        file = _file(place, folder.resolve())
        module = _load(place, ".".join(file.relative_to(folder.resolve()).with_suffix("").parts))
        if Path(str(module.__file__)) != file:
            raise ArgumentError(
                f'names the file {place}, but Python already has another module "{module.__name__}"; rename the file.'
            )
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
    return cast("Callable[..., Any]", found)


def _file(place: str, folder: Path) -> Path:
    # not resolved, since a link in the recipe's folder is a file of the recipe
    file = Path(os.path.normpath(folder / place))
    if not file.is_relative_to(folder) or not file.is_file():
        others = [str(other.relative_to(folder)) for other in sorted(folder.glob("*.py"))]
        raise ArgumentError(f"names the file {place}, but the folder {folder} has none; {advice(place, others)}")
    return file


def _load(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "torchmetrics":
            raise ArgumentError(f"can't be imported: {MissingExtraError('torchmetrics', 'torchmetrics')}") from error
        where = user_line(error)
        at = f" (raised at {where})" if where else ""
        raise ArgumentError(f"can't be imported: {place} raises {clause(error)}{at}.") from error
