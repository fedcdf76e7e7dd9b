"""Optimizers: step, parameter groups, learning rates and averages."""

from evenstep.optim import schedules
from evenstep.optim.groups import ParameterGroup

__all__ = ["ParameterGroup", "schedules"]
