"""Events of a run, hooks, metrics and writers."""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.events.bus import Bus
    from evenstep.events.event import (
        BackwardBegin,
        BackwardEnd,
        EpochBegin,
        EpochEnd,
        EvaluateBegin,
        EvaluateEnd,
        Event,
        ForwardBegin,
        ForwardEnd,
        Incident,
        Json,
        MicrobatchBegin,
        MicrobatchEnd,
        Outcome,
        SaveBegin,
        SaveEnd,
        StepBegin,
        StepEnd,
        TrainBegin,
        TrainEnd,
        UpdateBegin,
        UpdateEnd,
    )
    from evenstep.events.hook import Hook
    from evenstep.events.hooks import (
        Best,
        Console,
        EarlyStop,
        Evaluate,
        MemoryUse,
        Profile,
        Save,
        Statistics,
        Status,
        StopBelowLr,
        StopFile,
        TimeBudget,
        Timer,
        Watchdog,
    )
    from evenstep.events.incidents import IncidentFiles
    from evenstep.events.metrics.series import Record
    from evenstep.events.metrics.storage import Storage
    from evenstep.events.shown import Histogram, Image, Shown, Text
    from evenstep.events.writers import (
        WRITERS,
        ConsoleWriter,
        CsvWriter,
        JsonlWriter,
        MlflowWriter,
        TensorBoardWriter,
        WandbWriter,
        Writer,
        Writers,
    )
    from evenstep.events.writers.live import is_watched

__all__ = [
    "WRITERS",
    "BackwardBegin",
    "BackwardEnd",
    "Best",
    "Bus",
    "Console",
    "ConsoleWriter",
    "CsvWriter",
    "EarlyStop",
    "EpochBegin",
    "EpochEnd",
    "Evaluate",
    "EvaluateBegin",
    "EvaluateEnd",
    "Event",
    "ForwardBegin",
    "ForwardEnd",
    "Histogram",
    "Hook",
    "Image",
    "Incident",
    "IncidentFiles",
    "Json",
    "JsonlWriter",
    "MemoryUse",
    "MicrobatchBegin",
    "MicrobatchEnd",
    "MlflowWriter",
    "Outcome",
    "Profile",
    "Record",
    "Save",
    "SaveBegin",
    "SaveEnd",
    "Shown",
    "Statistics",
    "Status",
    "StepBegin",
    "StepEnd",
    "StopBelowLr",
    "StopFile",
    "Storage",
    "TensorBoardWriter",
    "Text",
    "TimeBudget",
    "Timer",
    "TrainBegin",
    "TrainEnd",
    "UpdateBegin",
    "UpdateEnd",
    "WandbWriter",
    "Watchdog",
    "Writer",
    "Writers",
    "is_watched",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".bus": "Bus",
        ".event": (
            "BackwardBegin BackwardEnd EpochBegin EpochEnd EvaluateBegin EvaluateEnd Event ForwardBegin "
            "ForwardEnd Incident Json MicrobatchBegin MicrobatchEnd Outcome SaveBegin SaveEnd StepBegin StepEnd "
            "TrainBegin TrainEnd UpdateBegin UpdateEnd"
        ),
        ".hook": "Hook",
        ".hooks": "Best Console EarlyStop Evaluate MemoryUse Profile Save Statistics Status StopBelowLr StopFile "
        "TimeBudget Timer Watchdog",
        ".incidents": "IncidentFiles",
        ".metrics.series": "Record",
        ".metrics.storage": "Storage",
        ".shown": "Histogram Image Shown Text",
        ".writers": "WRITERS ConsoleWriter CsvWriter JsonlWriter MlflowWriter TensorBoardWriter "
        "WandbWriter Writer Writers",
        ".writers.live": "is_watched",
    },
)
