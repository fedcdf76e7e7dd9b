"""Public names that have changed: the old one still works for one version, and warns.

A module whose names have changed takes `old_names` as its `__getattr__`; a function whose arguments have moved into
option objects is decorated with `old_arguments`. This is not a registry of all names; each stands beside what it names.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

from evenstep.errors import ArgumentError

_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def old_arguments(
    options: Mapping[str, type], moved: Mapping[str, str], nones: Mapping[str, object] | None = None
) -> Callable[[_Function], _Function]:
    """A decorator: keyword arguments that are fields of an option object now are still taken, each with a warning.

    Args:
        options: the class of each argument that is an option object.
        moved: what each old argument is now, as "argument.field".
        nones: what None, given for an old argument, is now; None by default.

    Raises:
        ArgumentError: when called with an old argument and with the option object that it is in now.

    >>> import warnings
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size: width: int = 1; height: int = 1
    >>> @old_arguments({"size": Size}, {"wide": "size.width"})
    ... def draw(*, size=Size()): return size
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(draw(wide=3))
    Size(width=3, height=1)
    >>> str(caught[0].message)
    '`wide=…` is called `size=Size(width=…)` now; the old name goes with the next version.'
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def called(*args: Any, **given: Any) -> Any:
            if not moved.keys() & given.keys():
                return function(*args, **given)
            kept = {name: value for name, value in given.items() if name not in moved}
            fields: dict[str, dict[str, Any]] = {}
            for old in [name for name in given if name in moved]:
                argument, _, field = moved[old].partition(".")
                new = f"{argument}={options[argument].__name__}({field}=…)"
                if argument in given:
                    raise ArgumentError(f"`{old}` and `{argument}` are both given; write `{new}` only.")
                warn(f"{old}=…", new)
                value = given[old]
                fields.setdefault(argument, {})[field] = (nones or {}).get(old) if value is None else value
            made = {argument: options[argument](**values) for argument, values in fields.items()}
            return function(*args, **kept, **made)

        return cast("_Function", called)

    return decorate
