"""Checkpoints: a run's whole state on disk, complete or absent, read without executing anything.

`__init__.pyi` is the table of the names, also at run time.
"""

from pathlib import Path

from evenstep.lazy import homes_in, lazy_names

_HOMES = homes_in(Path(__file__).with_suffix(".pyi"))
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
