"""Strategies: how gradients and parameters are shared between data-parallel ranks."""

from evenstep.parallel.single import Single
from evenstep.parallel.strategy import Strategy

__all__ = ["Single", "Strategy"]
