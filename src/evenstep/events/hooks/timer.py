"""How fast the run is, how far, and where its time goes, over windows of updates.

    perf/update_s, perf/samples_per_s    without the time of evaluations and checkpoints
    perf/data_s, perf/forward_s, …       seconds of each phase per update: all that there are add up to the whole
    perf/time, progress/samples          when the window ended, in seconds since 1970, and samples of all updates so far

Where there are several tasks also perf/<task>/samples_per_s and perf/<task>/data_s. It reads a clock and never waits
for a device, so a single update on an accelerator would mean little; a window is right because logging waits once in a
while.
"""

from time import perf_counter, time
from typing import final

from evenstep.events.event import (
    EvaluateBegin,
    EvaluateEnd,
    SaveBegin,
    SaveEnd,
    TrainBegin,
    TrainEnd,
    UpdateBegin,
    UpdateEnd,
)
from evenstep.events.hook import Hook


@final
class Timer(Hook):
    """Logs the seconds per committed update and per phase of it, and the samples per second.

    Args:
        every_updates: the number of updates in a window, after which values are logged; also at the end of the run.

    >>> hook = Timer(every_updates=50)
    """

    priority = -100  # first at both ends, so that what other hooks do counts

    def __init__(self, *, every_updates: int = 10) -> None:
        self._every = every_updates
        self._evaluation_began = self._save_began = 0.0
        self._saving = False
        self._begin()

    def before_train(self, event: TrainBegin) -> None:
        self.trainer.phases.take()  # what came before is of no update
        self._begin()

    def before_update(self, event: UpdateBegin) -> None:
        if self._saving:  # which goes on in the background: what came before this update is all that it cost
            self._began += perf_counter() - self._save_began - (event.data_s or 0.0)
            self._saving = False
        if event.data_s is not None:
            self._data_s += event.data_s
            self._fetches += 1
            for task, seconds in event.task_data_s.items():
                self._task_data_s[task] = self._task_data_s.get(task, 0.0) + seconds

    def after_update(self, event: UpdateEnd) -> None:
        if event.committed:
            self._updates += 1
            self._samples += event.num_samples
            for task, count in event.task_samples.items():
                self._task_samples[task] = self._task_samples.get(task, 0) + count
            if event.update % self._every == 0:
                self._put(event.update)

    def before_evaluate(self, event: EvaluateBegin) -> None:
        self._evaluation_began = perf_counter()

    def after_evaluate(self, event: EvaluateEnd) -> None:
        spent = perf_counter() - self._evaluation_began
        self._began += spent
        self._save_began += spent  # a save may be under way, whose time is left out as well, and this not twice

    def before_save(self, event: SaveBegin) -> None:
        self._save_began = perf_counter()
        self._saving = True

    def after_save(self, event: SaveEnd) -> None:
        if self._saving:
            self._began += perf_counter() - self._save_began
            self._saving = False

    def after_train(self, event: TrainEnd) -> None:
        if event.outcome != "failed" and self._updates:
            self._put(event.update)

    def _begin(self) -> None:
        self._began = perf_counter()
        self._updates = self._samples = self._fetches = 0
        self._data_s = 0.0
        self._task_data_s: dict[str, float] = {}
        self._task_samples: dict[str, int] = {}

    def _put(self, update: int) -> None:
        seconds, put = perf_counter() - self._began, self.trainer.storage.put
        put("perf/time", time(), update=update)
        put("progress/samples", float(self.trainer.progress.samples), update=update)
        put("perf/update_s", seconds, float(self._updates), update=update)
        put("perf/samples_per_s", float(self._samples), seconds, update=update)
        if self._fetches:
            put("perf/data_s", self._data_s, float(self._fetches), update=update)
        for task, count in self._task_samples.items():
            put(f"perf/{task}/samples_per_s", float(count), seconds, update=update)
        for task, waited in self._task_data_s.items():
            put(f"perf/{task}/data_s", waited, float(self._fetches), update=update)
        for phase, spent in self.trainer.phases.take().items():
            if spent and phase != "data":
                put(f"perf/{phase}_s", spent, float(self._updates), update=update)
        self._begin()
