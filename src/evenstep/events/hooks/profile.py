"""Traces of some updates by torch's profiler.

    profile/updates-10-13-rank-0.trace.json.gz    opens in https://ui.perfetto.dev and in chrome://tracing
    profile/updates-10-13-rank-0.memory.pickle    with `memory`: opens in https://docs.pytorch.org/memory_viz

Traces name the updates (`update 10`) and each action of the plan (`0F3 forward`: stage 0, micro-batch 3). Profiled
updates are slower, but have the same bits.
"""

from contextlib import ExitStack
from typing import Any, final

import torch
from torch.profiler import profile, record_function, supported_activities

from evenstep.errors import ArgumentError
from evenstep.events.event import TrainEvent, UpdateEvent
from evenstep.events.files import writing
from evenstep.events.hook import Hook, run_folder
from evenstep.files import replacing
from evenstep.internals import end_memory_history, profiler_runs, record_memory_history, save_memory_history
from evenstep.schema import Count


@final
class Profile(Hook):
    """Profiles updates `first` to `last` on each rank, into the folder `profile` of the run.

    Args:
        first: first update that is profiled; the first few of a run are slower than the others.
        last: last update that is profiled.
        memory: also record each allocation on the device, which needs CUDA.

    >>> hook = Profile(first=10, last=13)
    """

    priority = -200  # around all other hooks
    failure_policy = "continue"
    draws = False

    def __init__(self, *, first: Count, last: Count, memory: bool = False) -> None:
        self._first = first
        self._last = last
        self._memory = memory
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
            if self._memory:
                record_memory_history()
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
            if self._memory:
                save_memory_history(folder / f"{stem}.memory.pickle")
                end_memory_history()
            with replacing(folder / f"{stem}.trace.json.gz", sync=False) as new:
                profiler.export_chrome_trace(str(new))
