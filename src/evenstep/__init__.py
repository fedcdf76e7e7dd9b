"""evenstep: a PyTorch training engine in which one update is one update.

The parameters after update u depend on the model, the data order, the seed and u, and on nothing else: not on how the
global batch was cut into micro-batches, nor on what failed or was stopped in between.
"""

from evenstep import checkpoint, data, errors, events, optim, parallel, pipeline, precision, train
from evenstep.data import Data, MapData, StreamData
from evenstep.errors import EvenstepError
from evenstep.events import Hook, Writer
from evenstep.optim.ema import Ema
from evenstep.precision import Bf16Mixed, Fp16Mixed, Full, Precision
from evenstep.train import Loss, Result, Skip, Stop, Task, Trainer
from evenstep.version import __version__

__all__ = [
    "Bf16Mixed",
    "Data",
    "Ema",
    "EvenstepError",
    "Fp16Mixed",
    "Full",
    "Hook",
    "Loss",
    "MapData",
    "Precision",
    "Result",
    "Skip",
    "Stop",
    "StreamData",
    "Task",
    "Trainer",
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
