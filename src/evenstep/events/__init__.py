"""Events of a run, the hooks that hear them, the storage of its metrics, and the writers that keep those."""

from evenstep.events.bus import Bus
from evenstep.events.event import (
    BackwardBegin,
    BackwardEnd,
    EpochBegin,
    EpochEnd,
    EvaluateBegin,
    EvaluateEnd,
    Event,
    Incident,
    Json,
    MicrobatchBegin,
    MicrobatchEnd,
    Outcome,
    SaveBegin,
    SaveEnd,
    TrainBegin,
    TrainEnd,
    UpdateBegin,
    UpdateEnd,
)
from evenstep.events.hook import Hook, HookTrainer
from evenstep.events.hooks import Best, Console, EarlyStop, Evaluate, Save, Statistics, Status, Timer
from evenstep.events.incidents import IncidentFiles
from evenstep.events.series import Record
from evenstep.events.storage import Storage
from evenstep.events.writers import ConsoleWriter, CsvWriter, JsonlWriter, TensorBoardWriter, Writer, Writers

__all__ = [
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
    "Hook",
    "HookTrainer",
    "Incident",
    "IncidentFiles",
    "Json",
    "JsonlWriter",
    "MicrobatchBegin",
    "MicrobatchEnd",
    "Outcome",
    "Record",
    "Save",
    "SaveBegin",
    "SaveEnd",
    "Statistics",
    "Status",
    "Storage",
    "TensorBoardWriter",
    "Timer",
    "TrainBegin",
    "TrainEnd",
    "UpdateBegin",
    "UpdateEnd",
    "Writer",
    "Writers",
]
