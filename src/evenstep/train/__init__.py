"""Training: the trainer, its loop, and the update."""

from evenstep.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
