"""How much each task's loss counts, the λ_t of an update: one file each."""

from evenstep.train.coefficients.coefficients import Coefficients
from evenstep.train.coefficients.fixed import Fixed
from evenstep.train.coefficients.scheduled import Scheduled
from evenstep.train.coefficients.uncertainty import Uncertainty

__all__ = ["Coefficients", "Fixed", "Scheduled", "Uncertainty"]
