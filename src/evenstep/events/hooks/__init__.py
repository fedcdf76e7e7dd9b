"""Hooks that come with evenstep."""

from evenstep.events.hooks.best import Best
from evenstep.events.hooks.console import Console
from evenstep.events.hooks.measures import MemoryUse, Statistics, Timer
from evenstep.events.hooks.periods import Evaluate, Save
from evenstep.events.hooks.profile import Profile
from evenstep.events.hooks.status import Status
from evenstep.events.hooks.stops import EarlyStop, StopBelowLr, StopFile, TimeBudget
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
