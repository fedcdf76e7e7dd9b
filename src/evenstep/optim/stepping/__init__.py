"""Number formats of the optimizer's step."""

from evenstep.optim.stepping.masters import MasterSteps
from evenstep.optim.stepping.rounded import RoundedSteps
from evenstep.optim.stepping.stepping import Steps

__all__ = ["MasterSteps", "RoundedSteps", "Steps"]
