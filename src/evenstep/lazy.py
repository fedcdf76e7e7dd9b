"""Names of a package that are imported when they are first used, so that importing it loads no more than a run needs.

A package says in `TYPE_CHECKING` where its names come from, for editors and type checkers, and gives the same table
here for Python. A test compares the two.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from evenstep.renamed import old_names


def lazy_names(package: str, homes: Mapping[str, str], old: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: its `__name__`.
        homes: module → its public names, separated by spaces; `.module` is one of the package.
        old: the new name of each old one; see `renamed`.

    >>> square_root = lazy_names("example", {"math": "sqrt pi"})("sqrt")
    >>> square_root(9.0)
    3.0
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    renamed = old_names(package, old or {})

    def named(name: str) -> Any:
        if name not in home_of:
            return renamed(name)
        return getattr(import_module(home_of[name], package), name)

    return named
