"""Optimizers: step, parameter groups, learning rates and averages."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.optim.groups import ParameterGroup
    from evenstep.optim.multi import MultiOptimizer

__all__ = ["MultiOptimizer", "ParameterGroup"]

__getattr__, __dir__ = lazy_names(__name__, {".groups": "ParameterGroup", ".multi": "MultiOptimizer"})
