"""Traces of some updates by torch's profiler.

    profile/updates-10-13-rank-0.trace.json.gz    opens in https://ui.perfetto.dev and in chrome://tracing
    profile/updates-10-13-rank-0.memory.pickle    with `memory`: opens in https://docs.pytorch.org/memory_viz

What is done has a name in them: `update 10`, each action of the plan (`0F3 forward`: stage 0, micro-batch 3), `apply`.
Profiled updates are slower, and the same to the last bit. It changes nothing in those before and after.
"""

from contextlib import ExitStack
from typing import Any, final

import torch
from torch.profiler import profile, record_function, supported_activities

from evenstep.errors import ArgumentError, HookError
from evenstep.events.event import TrainBegin, TrainEnd, UpdateBegin, UpdateEnd
from evenstep.events.files import writing
from evenstep.events.hook import Hook
from evenstep.internals import end_memory_history, profiler_runs, record_memory_history, save_memory_history


@final
class Profile(Hook):
    """Profiles updates `first` to `last`, on each rank, into the folder `profile` of the run.

    Args:
        first: the first update that is profiled; the first few of a run are slower than the others.
        last: the last one.
        memory: whether each allocation on the device is recorded as well, which needs CUDA.

    >>> hook = Profile(first=10, last=13)
    """

    priority = -200  # around all other hooks
    failure_policy = "continue"  # a full disk is no reason to stop training

    def __init__(self, *, first: int, last: int, memory: bool = False) -> None:
        self._first, self._last, self._memory = first, last, memory
        self._profiler: Any = None
        self._ranges = ExitStack()
        self._began_at = 0

    def before_train(self, event: TrainBegin) -> None:
        if self.trainer.folder is None:
            raise HookError("a profile is written into the run folder, but this run has none; give it a `folder`.")

    def before_update(self, event: UpdateBegin) -> None:
        if self._profiler is None and self._first <= event.update <= self._last:
            if profiler_runs():  # in torch a second one ends the process
                raise ArgumentError(f"update {event.update} is not profiled, as another profiler runs.", field="first")
            self._began_at = event.update
            if self._memory:
                record_memory_history()
            # there is one cycle, of which torch 2.11 says that it forgets those before unless events are kept
            profiler = profile(activities=supported_activities(), acc_events=True)
            profiler.start()
            self._profiler = profiler
        if self._profiler is not None:
            self._ranges.enter_context(record_function(f"update {event.update}"))

    def after_update(self, event: UpdateEnd) -> None:
        self._ranges.close()
        if self._profiler is not None and event.committed and event.update >= self._last:
            self._end(event.update)

    def after_train(self, event: TrainEnd) -> None:
        if self._profiler is not None:  # the run ended before the last of its updates
            self._end(event.update)

    @property
    def _device(self) -> torch.device:
        return next((one.device for one in self.trainer.model.parameters()), torch.device("cpu"))

    def _end(self, update: int) -> None:
        profiler, self._profiler = self._profiler, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what was begun in these updates belongs to them
        profiler.stop()
        assert self.trainer.folder is not None, "asked before"
        folder = self.trainer.folder / "profile"
        stem = f"updates-{self._began_at}-{update}-rank-{self.trainer.rank}"
        with writing(folder, then="profile again"):
            folder.mkdir(parents=True, exist_ok=True)
            if self._memory:
                save_memory_history(folder / f"{stem}.memory.pickle")
                end_memory_history()
            beside = folder / f".{stem}.trace.json.gz"
            profiler.export_chrome_trace(str(beside))
            beside.replace(folder / f"{stem}.trace.json.gz")


def span_of(text: str) -> tuple[int, int]:
    """The updates that a text such as "10:13" says, or a single one.

    Raises:
        ValueError: it says none.

    >>> span_of("10:13"), span_of("10")
    ((10, 13), (10, 10))
    """
    first, _, last = text.partition(":")
    return int(first), int(last or first)
