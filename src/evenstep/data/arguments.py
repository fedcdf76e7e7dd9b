"""The checks that several files of this package ask of an argument.

They are not for what only one class asks; that stands with the class.
"""

from operator import index
from typing import SupportsIndex, cast

from evenstep.arguments import said
from evenstep.errors import ArgumentError

__all__ = ["require_callable", "require_count", "require_rank"]


def require_count(name: str, value: object, *, at_least: int = 1) -> int:
    """Return `value` as an `int` that is at least `at_least`.

    Raises:
        ArgumentError: `value` is not a whole number (a bool is none), or too small.

    >>> require_count("global_batch_size", 32)
    32
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(
            f"`{name}` must be a whole number, but is {value!r} ({type(value).__name__}); "
            f"give an int of at least {at_least}."
        )
    try:
        number = index(cast(SupportsIndex, value))
    except TypeError:
        raise ArgumentError(
            f"`{name}` must be a whole number, but is {said(value)}; give an int of at least {at_least}."
        ) from None
    if number < at_least:
        raise ArgumentError(f"`{name}` must be at least {at_least}, but is {number}; raise it.")
    return number


def require_callable(name: str, value: object, *, purpose: str) -> None:
    """Check that `value` can be called.

    Raises:
        ArgumentError: it cannot.

    >>> require_callable("collate", list, purpose="makes a batch of a list of samples")
    """
    if not callable(value):
        raise ArgumentError(
            f"`{name}` must be a function that {purpose}, but is {value!r}; give one or leave `{name}` out."
        )


def require_rank(rank: int, ranks: int) -> None:
    """Check that `rank` is one of `ranks`.

    Raises:
        ArgumentError: it is not.

    >>> require_rank(1, 2)
    """
    require_count("ranks", ranks)
    if require_count("rank", rank, at_least=0) >= ranks:
        raise ArgumentError(
            f"`rank` must be below the {ranks} ranks, but is {rank}; ranks count from 0, set `ranks` to their number."
        )
