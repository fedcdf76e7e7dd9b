"""Imports on first use: names of packages, objects named "module:name", libraries of extras."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from evenstep.errors import MissingExtraError
from evenstep.usual_words import name_for


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose `__init__.pyi` imports its public names."""
    module = sys.modules[package]
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    home_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def named(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'{name_for(name)}")
        home = home_of[name]
        found = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(module, name, found)  # the next look-up does not come here
        return found

    return sorted(home_of), named, lambda: sorted({*vars(module), *home_of})


def load(target: str) -> Any:
    """Object named by `target`, "module:name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def load_optional(module: str, extra: str, library: str = "") -> Any:
    """Module of a library that an extra installs; MissingExtraError where it is not installed, or is too old.

    Args:
        library: the library that it needs; by default the one that it is in.
    """
    library = library or module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        if str(error.name).partition(".")[0] != library:
            raise
        raise MissingExtraError(library, extra) from error
