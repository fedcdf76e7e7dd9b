"""Public names that have changed: the old one still works for one version, and warns.

A module whose names have changed takes `old_names` as its `__getattr__`. This is not a registry of all names; each
stands beside what it names.
"""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that `old` is called `new` now, where `stacklevel` says who uses it."""
    message = f"`{old}` is called `{new}` now; the old name goes with the next version."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `module` that gives what old names mean.

    Args:
        module: its dotted name.
        names: the new name of each old one; "package.module:name" where it has moved.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     found = old_names("math", {"root": "sqrt"})("root")(9.0)
    >>> found, str(caught[0].message)
    (3.0, '`math.root` is called `math.sqrt` now; the old name goes with the next version.')
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home, _, new = names[name].rpartition(":")
        home = home or module
        warn(f"{module}.{name}", f"{home}.{new}")
        return getattr(import_module(home), new)

    return get
