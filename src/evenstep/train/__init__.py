"""Training: the trainer, its loop, and the update."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.extras.multitask import AlignedMtl, GradNorm, PcGrad, Scheduled, Uncertainty
    from evenstep.train.coefficients import Coefficients, Fixed
    from evenstep.train.collect import Collected, Trained
    from evenstep.train.combine import Combine, Separate
    from evenstep.train.cross_entropy import chunked_cross_entropy
    from evenstep.train.engine import Engine
    from evenstep.train.failures import Answer, DropTask, FailurePolicy, Retry, Rewind, Skip, Stop
    from evenstep.train.loading import LoadedWeights, load_weights
    from evenstep.train.outcome import Aborted, Committed
    from evenstep.train.predict import Prediction
    from evenstep.train.progress import Progress
    from evenstep.train.result import Result
    from evenstep.train.spikes import LossSpikes
    from evenstep.train.task import Loss, Task
    from evenstep.train.trainer import Trainer

__all__ = [
    "Aborted",
    "AlignedMtl",
    "Answer",
    "Coefficients",
    "Collected",
    "Combine",
    "Committed",
    "DropTask",
    "Engine",
    "FailurePolicy",
    "Fixed",
    "GradNorm",
    "LoadedWeights",
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
    "chunked_cross_entropy",
    "load_weights",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "evenstep.extras.multitask": "AlignedMtl GradNorm PcGrad Scheduled Uncertainty",
        ".cross_entropy": "chunked_cross_entropy",
        ".coefficients": "Coefficients Fixed",
        ".collect": "Collected Trained",
        ".combine": "Combine Separate",
        ".engine": "Engine",
        ".failures": "Answer DropTask FailurePolicy Retry Rewind Skip Stop",
        ".loading": "LoadedWeights load_weights",
        ".outcome": "Aborted Committed",
        ".predict": "Prediction",
        ".progress": "Progress",
        ".result": "Result",
        ".spikes": "LossSpikes",
        ".task": "Loss Task",
        ".trainer": "Trainer",
    },
)
