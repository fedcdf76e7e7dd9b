"""evenstep: a PyTorch training engine in which one update is one update.

The parameters after update u depend on the model, the data order, the seed and u, and on nothing else: not on how the
global batch was cut into micro-batches, nor on what failed or was stopped in between.

Names are imported when they are first used, so that `evenstep --help` does not wait for torch. The packages that they
come from, such as `evenstep.data`, are here as well, but `from evenstep import *` leaves them out: it would overwrite
variables called `data` or `train`.
"""

import sys
from importlib import import_module

from evenstep.version import __version__

# not from typing: what is imported before the command line can answer a Ctrl-C is next to nothing
TYPE_CHECKING = False

if sys.platform == "win32":
    raise ImportError("evenstep does not run on Windows, as it rests on POSIX signals, locks and processes; use WSL 2.")

if TYPE_CHECKING:
    import typing

    from evenstep import checkpoint as checkpoint
    from evenstep import data as data
    from evenstep import errors as errors
    from evenstep import events as events
    from evenstep import lightning as lightning
    from evenstep import optim as optim
    from evenstep import parallel as parallel
    from evenstep import pipeline as pipeline
    from evenstep import precision as precision
    from evenstep import train as train
    from evenstep.contrib.multitask import AlignedMtl, GradNorm, PcGrad, Scheduled, Uncertainty
    from evenstep.data import (
        AllTasks,
        Batch,
        Data,
        MapData,
        Mixture,
        Reading,
        RoundRobin,
        Sampled,
        StreamData,
        UpdateData,
    )
    from evenstep.errors import EvenstepError
    from evenstep.events import (
        Best,
        ConsoleWriter,
        CsvWriter,
        EarlyStop,
        Evaluate,
        Hook,
        Incident,
        JsonlWriter,
        MemoryUse,
        MlflowWriter,
        Profile,
        Save,
        Statistics,
        StopBelowLr,
        StopFile,
        TensorBoardWriter,
        TimeBudget,
        Timer,
        WandbWriter,
        Watchdog,
        Writer,
    )
    from evenstep.events import Histogram as Histogram
    from evenstep.events import Image as Image
    from evenstep.events import Text as Text
    from evenstep.optim.ema import Ema
    from evenstep.optim.groups import ParameterGroup
    from evenstep.optim.schedules import Constant as Constant
    from evenstep.optim.schedules import (
        Cosine,
        CosineRestarts,
        InverseSqrt,
        Listed,
        LrSchedule,
        Multiplicative,
        PerGroup,
        Plateau,
        Polynomial,
        Triangular,
        TriStage,
        Wsd,
    )
    from evenstep.optim.schedules import Linear as Linear
    from evenstep.optim.schedules import Step as Step
    from evenstep.options import Checkpointing, Failures, Logging, Memory, Training
    from evenstep.parallel import (
        Ddp,
        Fsdp,
        Group,
        Mesh,
        Ordered,
        OrderedFsdp,
        Processes,
        Single,
        Strategy,
        Zero1,
    )
    from evenstep.pipeline import Layers, PipelineModel
    from evenstep.precision import (
        Bf16Mixed,
        Bf16NoMaster,
        Bf16True,
        Float8Mixed,
        Fp16Mixed,
        Fp16NoMaster,
        Fp16True,
        FullPrecision,
        Precision,
    )
    from evenstep.train import (
        Aborted,
        Coefficients,
        Combine,
        Committed,
        Engine,
        FailurePolicy,
        Fixed,
        Loss,
        LossSpikes,
        Prediction,
        Result,
        Retry,
        Rewind,
        Skip,
        Stop,
        Task,
        Trainer,
        chunked_cross_entropy,
        find_lr,
        grouped_optimizer,
        load_weights,
    )

__all__ = [
    "Aborted",
    "AlignedMtl",
    "AllTasks",
    "Batch",
    "Best",
    "Bf16Mixed",
    "Bf16NoMaster",
    "Bf16True",
    "Checkpointing",
    "Coefficients",
    "Combine",
    "Committed",
    "ConsoleWriter",
    "Cosine",
    "CosineRestarts",
    "CsvWriter",
    "Data",
    "Ddp",
    "EarlyStop",
    "Ema",
    "Engine",
    "Evaluate",
    "EvenstepError",
    "FailurePolicy",
    "Failures",
    "Fixed",
    "Float8Mixed",
    "Fp16Mixed",
    "Fp16NoMaster",
    "Fp16True",
    "Fsdp",
    "FullPrecision",
    "GradNorm",
    "Group",
    "Hook",
    "Incident",
    "InverseSqrt",
    "JsonlWriter",
    "Layers",
    "Listed",
    "Logging",
    "Loss",
    "LossSpikes",
    "LrSchedule",
    "MapData",
    "Memory",
    "MemoryUse",
    "Mesh",
    "Mixture",
    "MlflowWriter",
    "Multiplicative",
    "Ordered",
    "OrderedFsdp",
    "ParameterGroup",
    "PcGrad",
    "PerGroup",
    "PipelineModel",
    "Plateau",
    "Polynomial",
    "Precision",
    "Prediction",
    "Processes",
    "Profile",
    "Reading",
    "Result",
    "Retry",
    "Rewind",
    "RoundRobin",
    "Sampled",
    "Save",
    "Scheduled",
    "Single",
    "Skip",
    "Statistics",
    "Stop",
    "StopBelowLr",
    "StopFile",
    "Strategy",
    "StreamData",
    "Task",
    "TensorBoardWriter",
    "TimeBudget",
    "Timer",
    "Trainer",
    "Training",
    "TriStage",
    "Triangular",
    "Uncertainty",
    "UpdateData",
    "WandbWriter",
    "Watchdog",
    "Writer",
    "Wsd",
    "Zero1",
    "__version__",
    "chunked_cross_entropy",
    "find_lr",
    "grouped_optimizer",
    "load_weights",
]

_PARTS = ("checkpoint", "data", "errors", "events", "lightning", "optim", "parallel", "pipeline", "precision", "train")
_BESIDE = ("Constant", "Histogram", "Image", "Linear", "Step", "Text")  # that `*` leaves out: others have them, too
_HOMES = {
    ".data": "AllTasks Batch Data MapData Mixture Reading RoundRobin Sampled StreamData UpdateData",
    ".errors": "EvenstepError",
    ".events": "Best ConsoleWriter CsvWriter EarlyStop Evaluate Histogram Hook Image Incident JsonlWriter "
    "MemoryUse MlflowWriter Profile Save Statistics StopBelowLr StopFile TensorBoardWriter Text "
    "TimeBudget Timer WandbWriter Watchdog Writer",
    ".contrib.multitask": "AlignedMtl GradNorm PcGrad Scheduled Uncertainty",
    ".optim.ema": "Ema",
    ".optim.groups": "ParameterGroup",
    ".optim.schedules": "Constant Cosine CosineRestarts InverseSqrt Linear Listed LrSchedule Multiplicative "
    "PerGroup Plateau Polynomial Step TriStage Triangular Wsd",
    ".options": "Checkpointing Failures Logging Memory Training",
    ".parallel": "Ddp Fsdp Group Mesh Ordered OrderedFsdp Processes Single Strategy Zero1",
    ".pipeline": "Layers PipelineModel",
    ".precision": "Bf16Mixed Bf16NoMaster Bf16True Float8Mixed Fp16Mixed Fp16NoMaster Fp16True FullPrecision Precision",
    ".train": "Aborted Coefficients Combine Committed Engine FailurePolicy Fixed Loss "
    "LossSpikes Prediction Result Retry Rewind Skip Stop Task Trainer chunked_cross_entropy find_lr "
    "grouped_optimizer load_weights",
}


def __getattr__(name: str) -> "typing.Any":
    if name in _PARTS:
        return import_module(f"evenstep.{name}")
    from evenstep.lazy import lazy_names

    named, _ = lazy_names(__name__, _HOMES)
    try:
        return named(name)
    except AttributeError as error:
        homes = [] if name[0] == "_" else [import_module(f"evenstep.{part}") for part in _PARTS if part != "lightning"]
        home = next((one.__name__ for one in homes if name in getattr(one, "__all__", ())), None)
        raise AttributeError(f"{error}" + (f"; it is `{home}.{name}`" if home else "")) from None


def __dir__() -> list[str]:
    return sorted([*__all__, *_BESIDE, *_PARTS])
