"""Training models of `transformers`: tasks, packed rows, adapters, and folders as the hub has them.

The core never imports this; it is loaded when a script or a run file names it, and needs the extra `hf`."""

from evenstep.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
