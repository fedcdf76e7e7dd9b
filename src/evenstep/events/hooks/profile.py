"""Traces of some updates by torch's profiler, for https://ui.perfetto.dev."""

from contextlib import ExitStack
from typing import Any, final

import torch
from torch.profiler import profile, record_function, supported_activities

from evenstep.errors import ArgumentError
from evenstep.events.event import TrainEvent, UpdateEvent
from evenstep.events.files import writing
from evenstep.events.hook import Hook, run_folder
from evenstep.files import replacing
from evenstep.internals import profiler_runs
from evenstep.schema import Count


@final
class Profile(Hook):
    """Profiles updates `first` to `last` on each rank, into `profile/updates-10-13-rank-0.trace.json.gz`.

    The trace names the updates (`update 10`) and each action of the plan (`0F3 forward`: stage 0, micro-batch 3). The
    first few updates of a run are slower than the others. Profiled updates are slower, but have the same bits.

    >>> hook = Profile(first=10, last=13)
    """

    priority = -200  # around all other hooks
    failure_policy = "continue"
    draws = False

    def __init__(self, *, first: Count, last: Count) -> None:
        self._first = first
        self._last = last
        self._profiler: Any = None
        self._ranges = ExitStack()
        self._began_at = 0

    def before_train(self, event: TrainEvent) -> None:
        run_folder(self)

    def before_update(self, event: UpdateEvent) -> None:
        if self._profiler is None and self._first <= event.update <= self._last:
            if profiler_runs():  # in torch a second one ends the process
                raise ArgumentError(f"update {event.update} is not profiled: another profiler runs.", field="first")
            self._began_at = event.update
            # torch 2.11 warns of lost events of earlier cycles unless all events are kept
            profiler = profile(activities=supported_activities(), acc_events=True)
            profiler.start()
            self._profiler = profiler
        if self._profiler is not None:
            self._ranges.enter_context(record_function(f"update {event.update}"))

    def after_update(self, event: UpdateEvent) -> None:
        self._ranges.close()
        if event.committed and event.update >= self._last:
            self._end(event.update)

    def after_train(self, event: TrainEvent) -> None:
        self._end(event.update)

    def _end(self, update: int) -> None:
        profiler = self._profiler
        if profiler is None:
            return
        self._profiler = None
        if any(one.is_cuda for one in self.trainer.model.parameters()):
            torch.cuda.synchronize()  # so that the trace has all kernels
        profiler.stop()
        folder = run_folder(self) / "profile"
        stem = f"updates-{self._began_at}-{update}-rank-{self.trainer.rank}"
        with writing(folder, then="profile again"):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / f"{stem}.trace.json.gz", sync=False) as new:
                profiler.export_chrome_trace(str(new))
