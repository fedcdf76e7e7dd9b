"""Learning-rate schedules: pure functions from the number of an update to a multiplier, one file each."""

from collections.abc import Callable, Mapping

from evenstep.optim.schedules.constant import Constant
from evenstep.optim.schedules.cosine import Cosine
from evenstep.optim.schedules.inverse_sqrt import InverseSqrt
from evenstep.optim.schedules.linear import Linear
from evenstep.optim.schedules.polynomial import Polynomial
from evenstep.optim.schedules.schedule import LrSchedule
from evenstep.optim.schedules.wsd import Wsd

LR_SCHEDULES: Mapping[str, Callable[..., LrSchedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "wsd": Wsd,
    "inverse_sqrt": InverseSqrt,
    "polynomial": Polynomial,
}

__all__ = ["LR_SCHEDULES", "Constant", "Cosine", "InverseSqrt", "Linear", "LrSchedule", "Polynomial", "Wsd"]
