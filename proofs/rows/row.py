"""One row of the proof."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: something measured against a bound.

    Args:
        name: what was done.
        measure: what `run` measures.
        run: gives (value, bound); numbers must not exceed their bound, texts must equal it.
    """

    name: str
    measure: str
    run: Callable[[], tuple[float, float] | tuple[str, str]]
