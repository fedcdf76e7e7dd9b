"""Training: the trainer, its loop, and the update."""

from evenstep.train.failures import Answer, FailurePolicy, Retry, Rewind, Skip, Stop
from evenstep.train.progress import Progress
from evenstep.train.spikes import LossSpikes
from evenstep.train.task import Loss, Task
from evenstep.train.trainer import Result, Trainer

__all__ = [
    "Answer",
    "FailurePolicy",
    "Loss",
    "LossSpikes",
    "Progress",
    "Result",
    "Retry",
    "Rewind",
    "Skip",
    "Stop",
    "Task",
    "Trainer",
]
