"""evenstep: a PyTorch training engine in which one update is one update.

The parameters after update u depend on the model, the data order, the seed and u, and on nothing else: not on how the
global batch was cut into micro-batches, nor on what failed or was stopped in between.

Names are imported when they are first used, so that `evenstep --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.renamed import old_names
from evenstep.version import __version__

if TYPE_CHECKING:
    from evenstep import checkpoint, data, errors, events, optim, parallel, pipeline, precision, train
    from evenstep.data import Batch, Data, MapData, Mixture, StreamData, UpdateData
    from evenstep.errors import EvenstepError
    from evenstep.events import Hook, Writer
    from evenstep.optim.ema import Ema
    from evenstep.options import Checkpointing, Failures, Logging, Training
    from evenstep.precision import Bf16Mixed, Fp16Mixed, FullPrecision, Precision
    from evenstep.train import (
        Aborted,
        Committed,
        DropTask,
        Engine,
        Loss,
        LossSpikes,
        Result,
        Retry,
        Rewind,
        Skip,
        Stop,
        Task,
        Trainer,
    )

__all__ = [
    "Aborted",
    "Batch",
    "Bf16Mixed",
    "Checkpointing",
    "Committed",
    "Data",
    "DropTask",
    "Ema",
    "Engine",
    "EvenstepError",
    "Failures",
    "Fp16Mixed",
    "FullPrecision",
    "Hook",
    "Logging",
    "Loss",
    "LossSpikes",
    "MapData",
    "Mixture",
    "Precision",
    "Result",
    "Retry",
    "Rewind",
    "Skip",
    "Stop",
    "StreamData",
    "Task",
    "Trainer",
    "Training",
    "UpdateData",
    "Writer",
    "__version__",
    "checkpoint",
    "data",
    "errors",
    "events",
    "optim",
    "parallel",
    "pipeline",
    "precision",
    "train",
]

_HOMES = {
    "data": ("Batch", "Data", "MapData", "Mixture", "StreamData", "UpdateData"),
    "errors": ("EvenstepError",),
    "events": ("Hook", "Writer"),
    "optim.ema": ("Ema",),
    "options": ("Checkpointing", "Failures", "Logging", "Training"),
    "precision": ("Bf16Mixed", "Fp16Mixed", "FullPrecision", "Precision"),
    "train": (
        *("Aborted", "Committed", "DropTask", "Engine", "Loss", "LossSpikes", "Result", "Retry", "Rewind", "Skip"),
        *("Stop", "Task", "Trainer"),
    ),
}
_old = old_names(__name__, {"Full": "FullPrecision"})
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"evenstep.{_HOME_OF[name]}"), name)
    if name in __all__:
        return import_module(f"evenstep.{name}")
    return _old(name)


def __dir__() -> list[str]:
    return __all__
