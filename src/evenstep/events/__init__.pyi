# ruff: noqa: I001 - it would write a statement per name

from evenstep.events.bus import Bus as Bus
from evenstep.events.event import (
    EpochEvent as EpochEvent,
    EvaluateEvent as EvaluateEvent,
    Event as Event,
    Incident as Incident,
    Json as Json,
    MicrobatchEvent as MicrobatchEvent,
    Outcome as Outcome,
    SaveEvent as SaveEvent,
    StepEvent as StepEvent,
    TrainEvent as TrainEvent,
    UpdateEvent as UpdateEvent,
)
from evenstep.events.files import IncidentFiles as IncidentFiles
from evenstep.events.hook import Hook as Hook
from evenstep.events.hooks.best import Best as Best
from evenstep.events.hooks.measures import (
    Statistics as Statistics,
    Timer as Timer,
)
from evenstep.events.hooks.periods import Evaluate as Evaluate, Save as Save
from evenstep.events.hooks.profile import Profile as Profile
from evenstep.events.hooks.status import Status as Status
from evenstep.events.hooks.stops import (
    EarlyStop as EarlyStop,
    StopBelowLr as StopBelowLr,
    StopFile as StopFile,
    TimeBudget as TimeBudget,
)
from evenstep.events.hooks.watchdog import Watchdog as Watchdog
from evenstep.events.metrics.pairs import Record as Record
from evenstep.events.metrics.storage import Storage as Storage
from evenstep.events.shown import Image as Image, Shown as Shown, Text as Text
from evenstep.events.writers import WRITERS as WRITERS
from evenstep.events.writers.console import ConsoleWriter as ConsoleWriter
from evenstep.events.writers.files import CsvWriter as CsvWriter, JsonlWriter as JsonlWriter
from evenstep.events.writers.live import is_watched as is_watched
from evenstep.events.writers.services import (
    MlflowWriter as MlflowWriter,
    TensorBoardWriter as TensorBoardWriter,
    WandbWriter as WandbWriter,
)
from evenstep.events.writers.writer import Writer as Writer, Writers as Writers
