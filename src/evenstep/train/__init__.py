"""Training: the trainer, its loop, and the update."""

from evenstep.train.coefficients import Coefficients, Fixed, Scheduled, Uncertainty
from evenstep.train.collect import Collected, Trained
from evenstep.train.combine import AlignedMtl, Combine, GradNorm, PcGrad, Separate
from evenstep.train.failures import Answer, DropTask, FailurePolicy, Retry, Rewind, Skip, Stop
from evenstep.train.predict import Prediction
from evenstep.train.progress import Progress
from evenstep.train.result import Result
from evenstep.train.spikes import LossSpikes
from evenstep.train.task import Loss, Task
from evenstep.train.trainer import Trainer

__all__ = [
    "AlignedMtl",
    "Answer",
    "Coefficients",
    "Collected",
    "Combine",
    "DropTask",
    "FailurePolicy",
    "Fixed",
    "GradNorm",
    "Loss",
    "LossSpikes",
    "PcGrad",
    "Prediction",
    "Progress",
    "Result",
    "Retry",
    "Rewind",
    "Scheduled",
    "Separate",
    "Skip",
    "Stop",
    "Task",
    "Trained",
    "Trainer",
    "Uncertainty",
]
