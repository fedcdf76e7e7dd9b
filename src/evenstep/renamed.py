"""Public names that have changed: the old one still works for one version, and warns.

A module whose names have changed takes `old_names` as its `__getattr__`, a constructor whose arguments have moved into
option objects `takes_old_arguments`. This is not a registry of all names; each stands beside what it names.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar, cast

from evenstep.errors import ArgumentError
from evenstep.keywords import answering

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


def takes_old_arguments(
    moved: Mapping[str, str], nones: Mapping[str, object] | None = None
) -> Callable[[_Function], _Function]:
    """A decorator of a constructor: old arguments are still taken, and put into their option objects, with a warning.

    Args:
        moved: each old argument, and the field that it is now, as "argument.field".
        nones: what None meant for some of them.

    Raises:
        ArgumentError: when called with an old argument and with the option object that it is in now.

    >>> import warnings
    >>> from evenstep.options import Logging
    >>> class Trains:
    ...     @takes_old_arguments({"log_every_updates": "log.every_updates"})
    ...     def __init__(self, *, log=Logging()): self.log = log
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(Trains(log_every_updates=3).log)
    Logging(every_updates=3, writers=None, flops=False, peak_tflops=None)
    >>> str(caught[0].message)
    '`log_every_updates=…` is called `log=Logging(every_updates=…)` now; the old name goes with the next version.'
    """

    def taking(constructor: _Function) -> _Function:
        built = answering(constructor)

        @wraps(constructor)
        def called(*args: Any, **given: Any) -> Any:
            if not moved.keys() & given.keys():
                return built(*args, **given)
            kept = {name: value for name, value in given.items() if name not in moved}
            options: dict[str, Any] = {}
            for old in [name for name in given if name in moved]:
                argument, _, field = moved[old].partition(".")
                kind = type(signature(constructor).parameters[argument].default)
                new = f"{argument}={kind.__name__}({field}=…)"
                if argument in given:
                    raise ArgumentError(f"`{old}` and `{argument}` are both given; write `{new}` only.")
                warn(f"{old}=…", new)
                value = (nones or {}).get(old) if given[old] is None else given[old]
                options.setdefault(argument, (kind, {}))[1][field] = value
            return built(*args, **kept, **{name: kind(**fields) for name, (kind, fields) in options.items()})

        cast("Any", called).answers = True
        return cast("_Function", called)

    return taking
