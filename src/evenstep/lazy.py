"""Names of a package that are imported when they are first used, so that importing it loads no more than a run needs.

A package says in `TYPE_CHECKING` where its names come from, for editors and type checkers, and gives the same table
here for Python. A test compares the two.
"""

import gc
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar, final

from evenstep.plugins import load
from evenstep.usual_words import name_for

T = TypeVar("T")


@contextmanager
def _uncollected() -> Generator[None]:
    """Inside, no garbage is collected, if it is otherwise: what an import makes stays.

    Looking through all that torch has made, in the midst of it, takes a third as long as importing all of this package.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
        with _uncollected():
            found = getattr(import_module(home_of[name], package), name)
        setattr(sys.modules[package], name, found)  # so that it is asked for once
        return found

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return named, listed


@final
class LazyTable(Mapping[str, T]):
    """A table of names whose values are imported when they are looked up; its names are known before.

    Args:
        targets: what each name stands for, as "module:name".

    >>> roots = LazyTable[Any]({"square": "math:sqrt", "cube": "math:cbrt"})
    >>> list(roots), roots["square"](9.0)
    (['square', 'cube'], 3.0)
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = targets

    def __getitem__(self, name: str) -> T:
        return load(self._targets[name])

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
