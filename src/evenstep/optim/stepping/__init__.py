"""In which format the optimizer takes its step; one file each."""

from evenstep.optim.stepping.masters import MasterSteps
from evenstep.optim.stepping.rounded import RoundedSteps
from evenstep.optim.stepping.stepping import Steps

__all__ = ["MasterSteps", "RoundedSteps", "Steps"]
