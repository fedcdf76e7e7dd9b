"""Objects that keep the state of one run, such as a loss scale or a hook's best value: one trainer each."""

import weakref
from collections.abc import Mapping
from typing import Any

from evenstep.errors import ArgumentError

_TAKEN: dict[int, "weakref.ref[Any]"] = {}


def check_unused(given: Mapping[str, object]) -> None:
    """Raise ArgumentError for an object, by the argument it was given for, that another trainer or engine has."""
    for name, one in given.items():
        taken = _TAKEN.get(id(one))
        if taken is not None and taken() is one:
            raise ArgumentError(
                f"{name} keeps the state of another trainer or engine; make another, `{type(one).__name__}(…)`."
            )


def mark_used(given: Mapping[str, object]) -> None:
    """Mark the objects of a trainer that has been built."""
    for one in given.values():
        key = id(one)
        _TAKEN[key] = weakref.ref(one, lambda _gone, key=key: _TAKEN.pop(key, None))
