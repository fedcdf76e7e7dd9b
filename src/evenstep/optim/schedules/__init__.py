"""Learning-rate schedules: pure functions from the number of an update to a multiplier, one file each."""

from evenstep.optim.schedules.constant import Constant
from evenstep.optim.schedules.cosine import Cosine
from evenstep.optim.schedules.inverse_sqrt import InverseSqrt
from evenstep.optim.schedules.linear import Linear
from evenstep.optim.schedules.polynomial import Polynomial
from evenstep.optim.schedules.schedule import LrSchedule
from evenstep.optim.schedules.wsd import Wsd

__all__ = ["Constant", "Cosine", "InverseSqrt", "Linear", "LrSchedule", "Polynomial", "Wsd"]
