"""Events of a run, hooks, metrics and writers. `__init__.pyi` is the table of the names, also at run time."""

from evenstep.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
