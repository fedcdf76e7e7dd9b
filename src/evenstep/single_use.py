"""Objects that keep the state of one run, such as a loss scale or a hook's best value: one trainer each."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from evenstep.errors import ArgumentError

_TAKEN: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def check_unused(given: Mapping[str, object]) -> None:
    """Raise ArgumentError for an object, by the argument it was given for, that another trainer or engine has."""
    for name, one in given.items():
        if _TAKEN.get(id(one)) is one:
            instead = f"make another, `{type(one).__name__}(…)`."
            raise ArgumentError(f"{name} keeps the state of another trainer or engine; {instead}")


def mark_used(given: Mapping[str, object]) -> None:
    """Mark the objects of a trainer that has been built."""
    _TAKEN.update({id(one): one for one in given.values()})
