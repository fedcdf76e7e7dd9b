"""The checks that hooks and writers ask of their arguments."""

import math
from numbers import Real

from evenstep.arguments import said
from evenstep.errors import ArgumentError


def require_count(name: str, value: object) -> None:
    """Check that `value` is a whole number from 1 on.

    Raises:
        ArgumentError: it is not.

    >>> require_count("every_updates", 10)
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"`{name}` must be a whole number of at least 1, but is {said(value)}; give such a number.")


def require_stream(value: object) -> None:
    """Raise ArgumentError unless `value` is something to write text to, or None."""
    if value is not None and not callable(getattr(value, "write", None)):
        raise ArgumentError(f"`stream` must be a text stream, but is {said(value)}; write `stream=sys.stdout`.")


def require_positive(name: str, value: object) -> None:
    """Check that `value` is a number above 0 and below infinity.

    Raises:
        ArgumentError: it is not.

    >>> require_positive("every_minutes", 0.5)
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ArgumentError(f"`{name}` must be a number above 0, but is {said(value)}; give such a number.")
