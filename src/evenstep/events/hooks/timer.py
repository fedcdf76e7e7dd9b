"""Speed and progress of the run, and where its time goes, over windows of updates.

    perf/update_s, perf/samples_per_s    without the time of evaluations and checkpoints
    perf/data_s, perf/forward_s, …       seconds of each phase per update; they add up to the whole
    perf/time, progress/samples          end of the window in seconds since 1970, and samples of all updates so far

With several tasks also perf/<task>/samples_per_s and perf/<task>/data_s.
"""

from collections.abc import Mapping
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
from evenstep.schema import Count


@final
class Timer(Hook):
    """Logs seconds per committed update and per phase, and samples per second.

    It never waits for a device, so a window should be longer than a few updates.

    Args:
        every_updates: updates in a window; the end of the run ends the last one.

    >>> hook = Timer(every_updates=50)
    """

    priority = -100  # the time of other hooks counts
    draws = False
    may_evaluate = False

    def __init__(self, *, every_updates: Count = 10) -> None:
        self._every = every_updates
        self._evaluation_began = 0.0
        self._save_began = 0.0
        self._is_saving = False
        self._begin()

    def before_train(self, event: TrainBegin) -> None:
        self.trainer.phases.take()
        self._begin()

    def before_update(self, event: UpdateBegin) -> None:
        if self._is_saving:  # in the background from now on
            self._began += perf_counter() - self._save_began - (event.data_s or 0.0)
            self._is_saving = False
        if event.data_s is not None:
            self._data_s += event.data_s
            self._fetches += 1
            _add(self._task_data_s, event.task_data_s)

    def after_update(self, event: UpdateEnd) -> None:
        if event.committed:
            self._updates += 1
            self._samples += event.num_samples
            _add(self._task_samples, event.task_samples)
            if event.update % self._every == 0:
                self._put(event.update)

    def before_evaluate(self, event: EvaluateBegin) -> None:
        self._evaluation_began = perf_counter()

    def after_evaluate(self, event: EvaluateEnd) -> None:
        spent = perf_counter() - self._evaluation_began
        self._began += spent
        self._save_began += spent  # of a save under way, which is left out as well

    def before_save(self, event: SaveBegin) -> None:
        self._save_began = perf_counter()
        self._is_saving = True

    def after_save(self, event: SaveEnd) -> None:
        if self._is_saving:
            self._began += perf_counter() - self._save_began
            self._is_saving = False

    def after_train(self, event: TrainEnd) -> None:
        if event.outcome != "failed" and self._updates:
            self._put(event.update)

    def _begin(self) -> None:
        self._began = perf_counter()
        self._updates = 0
        self._samples = 0
        self._fetches = 0
        self._data_s = 0.0
        self._task_data_s: dict[str, float] = {}
        self._task_samples: dict[str, float] = {}

    def _put(self, update: int) -> None:
        seconds = perf_counter() - self._began
        updates, fetches = float(self._updates), float(self._fetches)
        values = {
            "perf/time": (time(), 1.0),
            "progress/samples": (float(self.trainer.progress.samples), 1.0),
            "perf/update_s": (seconds, updates),
            "perf/samples_per_s": (float(self._samples), seconds),
            "perf/data_s": (self._data_s, fetches),
        }
        values |= {f"perf/{task}/samples_per_s": (count, seconds) for task, count in self._task_samples.items()}
        values |= {f"perf/{task}/data_s": (waited, fetches) for task, waited in self._task_data_s.items()}
        phases = self.trainer.phases.take().items()
        values |= {f"perf/{phase}_s": (spent, updates) for phase, spent in phases if spent and phase != "data"}
        for name, (total, weight) in values.items():
            self.trainer.storage.put(name, total, weight, update=update)
        self._begin()


def _add(totals: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        totals[name] = totals.get(name, 0.0) + value
