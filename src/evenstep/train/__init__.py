"""Training: the trainer, its loop, and the update."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.train.engine import Engine
    from evenstep.train.failures import Answer, FailurePolicy, LossSpikes, Retry, Rewind, Skip, Stop
    from evenstep.train.grouped import described_groups, grouped_optimizer
    from evenstep.train.lr_finder import FoundLr, find_lr
    from evenstep.train.progress import Progress
    from evenstep.train.result import Prediction, Result
    from evenstep.train.state.loading import LoadedWeights, load_weights
    from evenstep.train.tasks.cross_entropy import chunked_cross_entropy
    from evenstep.train.tasks.task import Loss, Task
    from evenstep.train.tasks.weighting import Coefficients, Combine, Fixed, Separate, TaskWeights
    from evenstep.train.trainer import Trainer
    from evenstep.train.update.dummy import is_dummy_pass
    from evenstep.train.update.outcome import Aborted, Committed

__all__ = [
    "Aborted",
    "Answer",
    "Coefficients",
    "Combine",
    "Committed",
    "Engine",
    "FailurePolicy",
    "Fixed",
    "FoundLr",
    "LoadedWeights",
    "Loss",
    "LossSpikes",
    "Prediction",
    "Progress",
    "Result",
    "Retry",
    "Rewind",
    "Separate",
    "Skip",
    "Stop",
    "Task",
    "TaskWeights",
    "Trainer",
    "chunked_cross_entropy",
    "described_groups",
    "find_lr",
    "grouped_optimizer",
    "is_dummy_pass",
    "load_weights",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".grouped": "described_groups grouped_optimizer",
        ".lr_finder": "FoundLr find_lr",
        ".tasks.cross_entropy": "chunked_cross_entropy",
        ".tasks.weighting": "Coefficients Combine Fixed Separate TaskWeights",
        ".engine": "Engine",
        ".failures": "Answer FailurePolicy LossSpikes Retry Rewind Skip Stop",
        ".state.loading": "LoadedWeights load_weights",
        ".update.dummy": "is_dummy_pass",
        ".update.outcome": "Aborted Committed",
        ".progress": "Progress",
        ".result": "Prediction Result",
        ".tasks.task": "Loss Task",
        ".trainer": "Trainer",
    },
)
