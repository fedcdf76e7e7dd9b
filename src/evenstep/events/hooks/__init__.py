"""The hooks that come with evenstep, one per file."""

from evenstep.events.hooks.best import Best
from evenstep.events.hooks.console import Console
from evenstep.events.hooks.early_stop import EarlyStop
from evenstep.events.hooks.evaluate import Evaluate
from evenstep.events.hooks.memory_use import MemoryUse
from evenstep.events.hooks.profile import Profile
from evenstep.events.hooks.save import Save
from evenstep.events.hooks.statistics import Statistics
from evenstep.events.hooks.status import Status
from evenstep.events.hooks.stop_below_lr import StopBelowLr
from evenstep.events.hooks.stop_file import StopFile
from evenstep.events.hooks.time_budget import TimeBudget
from evenstep.events.hooks.timer import Timer
from evenstep.events.hooks.watchdog import Watchdog

__all__ = [
    "Best",
    "Console",
    "EarlyStop",
    "Evaluate",
    "MemoryUse",
    "Profile",
    "Save",
    "Statistics",
    "Status",
    "StopBelowLr",
    "StopFile",
    "TimeBudget",
    "Timer",
    "Watchdog",
]
