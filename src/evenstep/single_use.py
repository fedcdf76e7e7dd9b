"""Objects that keep the state of one run, such as a loss scale or a hook's best value: one trainer each."""

import weakref
from collections.abc import Mapping
from typing import Any

from evenstep.errors import ArgumentError

_TAKEN: dict[int, "weakref.ref[Any]"] = {}


def check_unused(given: Mapping[str, object]) -> None:
    """Raise ArgumentError for an object that another trainer or engine has.

    Args:
        given: objects by the arguments that they were given for.
    """
    for name, one in given.items():
        taken = _TAKEN.get(id(one))
        if taken is not None and taken() is one:
            kind = type(one).__name__
            raise ArgumentError(
                f"{name} belongs to another trainer or engine, whose state it keeps; make another, `{kind}(…)`."
            )


def mark_used(given: Mapping[str, object]) -> None:
    """Mark the objects of a trainer that has been built.

    >>> class Scale: pass
    >>> scale = Scale()
    >>> check_unused({"`precision`": scale}); mark_used({"`precision`": scale})
    >>> check_unused({"`precision`": scale})
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `precision` belongs to another trainer or engine, whose state it keeps; make ...
    """
    for one in given.values():
        key = id(one)
        _TAKEN[key] = weakref.ref(one, lambda _gone, key=key: _TAKEN.pop(key, None))
