"""What keeps something of a run belongs to one trainer or engine: another one would go on with what the first has left.

A loss scale, learned coefficients, how often a policy has skipped, the best value that a hook has seen. Such an object
is marked when what it was given to is built, and refused where it is given again. What keeps nothing may be shared.
"""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from evenstep.errors import ArgumentError

_TAKEN: dict[int, "weakref.ref[Any]"] = {}


def check_unused(given: Mapping[str, object]) -> None:
    """Raise ArgumentError for an object that another trainer was built with.

    Args:
        given: objects that keep something of a run, by the arguments that they were given for.
    """
    for name, one in given.items():
        taken = _TAKEN.get(id(one))
        if taken is not None and taken() is one:
            kind = type(one).__name__
            raise ArgumentError(
                f"{name} was given to another trainer or engine, and keeps what that has made of it; make another,"
                f" `{kind}(…)`. `resume`, or `load_state_dict`, goes on with what a checkpoint has of it."
            )


def mark_used(given: Mapping[str, object]) -> None:
    """Mark the same as given, once what they were given to is built.

    >>> class Scale: pass
    >>> scale = Scale()
    >>> check_unused({"`precision`": scale}); mark_used({"`precision`": scale})
    >>> check_unused({"`precision`": scale})
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `precision` was given to another trainer or engine, and keeps what ...
    """
    for one in given.values():
        _TAKEN[id(one)] = weakref.ref(one, partial(_forget, id(one)))


def _forget(key: int, gone: object) -> None:
    _TAKEN.pop(key, None)
