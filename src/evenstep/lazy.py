"""Imports on first use: names of packages, objects named "module:name", libraries of extras.

A package lists the homes of its names under `TYPE_CHECKING` for editors, and in the same table here for Python. A test
compares the two.
"""

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from evenstep.errors import MissingExtraError
from evenstep.usual_words import name_for


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        homes: module → its public names, separated by spaces; `.module` is one of the package.

    >>> square_root = lazy_names(__name__, {"math": "sqrt pi"})[0]("sqrt")
    >>> square_root(9.0)
    3.0
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def named(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'{name_for(name)}")
        was_enabled = gc.isenabled()
        gc.disable()  # a collection amid the import of torch takes longer than importing this package
        try:
            found = getattr(import_module(home_of[name], package), name)
        finally:
            if was_enabled:
                gc.enable()
        setattr(sys.modules[package], name, found)  # the next look-up does not come here
        return found

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return named, listed


def homes_in(stub: Path) -> dict[str, str]:
    """The modules that a stub imports from, each with the names, separated by spaces."""
    import ast

    imports = [node for node in ast.parse(stub.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {str(node.module): " ".join(alias.name for alias in node.names) for node in imports}


def load(target: str) -> Any:
    """Object named by `target`, "module:name".

    >>> load("math:floor")(1.5)
    1
    """
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def load_optional(module: str, extra: str, library: str = "") -> Any:
    """Module of a library that one of evenstep's extras installs.

    Args:
        module: its full name.
        extra: the extra of evenstep that installs it.
        library: the library that it needs; by default the one that it is in.

    Raises:
        MissingExtraError: the library is not installed, or is too old for it.

    >>> load_optional("nowhere", "hf")
    Traceback (most recent call last):
    evenstep.errors.MissingExtraError: `nowhere` is needed for this but is not installed; install it with `pip ...
    """
    library = library or module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        if str(error.name).partition(".")[0] != library:
            raise
        raise MissingExtraError(library, extra) from error
