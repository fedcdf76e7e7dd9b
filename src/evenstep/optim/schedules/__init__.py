"""Learning-rate schedules: pure functions from the number of an update to a multiplier, one file each."""

from collections.abc import Callable, Mapping

from evenstep.optim.schedules.constant import Constant
from evenstep.optim.schedules.cosine import Cosine
from evenstep.optim.schedules.cosine_restarts import CosineRestarts
from evenstep.optim.schedules.inverse_sqrt import InverseSqrt
from evenstep.optim.schedules.linear import Linear
from evenstep.optim.schedules.listed import Listed
from evenstep.optim.schedules.multiplicative import Multiplicative
from evenstep.optim.schedules.per_group import PerGroup
from evenstep.optim.schedules.plateau import Plateau
from evenstep.optim.schedules.polynomial import Polynomial
from evenstep.optim.schedules.schedule import CountedSchedule, LrSchedule
from evenstep.optim.schedules.step import Step
from evenstep.optim.schedules.tri_stage import TriStage
from evenstep.optim.schedules.triangular import Triangular
from evenstep.optim.schedules.wsd import Wsd


def plateaus_of(schedule: LrSchedule | None) -> list[Plateau]:
    """The schedules that follow evaluations: itself, or those of its groups, each once."""
    inner = [*schedule.groups.values(), schedule.others] if isinstance(schedule, PerGroup) else [schedule]
    return list({id(one): one for one in inner if isinstance(one, Plateau)}.values())


LR_SCHEDULES: Mapping[str, Callable[..., LrSchedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_restarts": CosineRestarts,
    "wsd": Wsd,
    "inverse_sqrt": InverseSqrt,
    "polynomial": Polynomial,
    "tri_stage": TriStage,
    "triangular": Triangular,
    "step": Step,
    "multiplicative": Multiplicative,
    "listed": Listed,
    "plateau": Plateau,
}

__all__ = [
    "LR_SCHEDULES",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "CountedSchedule",
    "InverseSqrt",
    "Linear",
    "Listed",
    "LrSchedule",
    "Multiplicative",
    "PerGroup",
    "Plateau",
    "Polynomial",
    "Step",
    "TriStage",
    "Triangular",
    "Wsd",
    "plateaus_of",
]
