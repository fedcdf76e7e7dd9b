"""The checks that hooks and writers ask of their arguments."""

import math

from evenstep.errors import ArgumentError


def require_count(name: str, value: object) -> None:
    """Check that `value` is a whole number from 1 on.

    Raises:
        ArgumentError: it is not.

    >>> require_count("every_updates", 10)
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"`{name}` must be a whole number of at least 1, but is {value!r}; give such a number.")


def require_positive(name: str, value: float) -> None:
    """Check that `value` is a number above 0 and below infinity.

    Raises:
        ArgumentError: it is not.

    >>> require_positive("every_minutes", 0.5)
    """
    if not 0 < value < math.inf:
        raise ArgumentError(f"`{name}` must be a number above 0, but is {value!r}; give such a number.")
