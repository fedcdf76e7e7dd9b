"""Some updates as torch's profiler sees them: a trace to look into, and a table by operator.

    profile/updates-10-13-rank-0.trace.json.gz    opens in https://ui.perfetto.dev and in chrome://tracing
    profile/updates-10-13-rank-0.operators.json   {"updates", "rank", "device", "operators", "ranges"}, in microseconds
    profile/updates-10-13-rank-0.memory.pickle    with `memory`: opens in https://docs.pytorch.org/memory_viz

What is done has a name in them: `update 10`, each action of the plan (`0F3 forward`: stage 0, micro-batch 3), `apply`.
Profiled updates are slower, and the same to the last bit. It changes nothing in those before and after.
"""

import json
from contextlib import ExitStack
from typing import Any, final

import torch
from torch.profiler import profile, record_function, supported_activities

from evenstep.arguments import require_flag, require_whole
from evenstep.errors import ArgumentError, HookError
from evenstep.events.event import TrainBegin, TrainEnd, UpdateBegin, UpdateEnd
from evenstep.events.files import replace_text, writing
from evenstep.events.hook import Hook
from evenstep.internals import end_memory_history, profiler_runs, record_memory_history, save_memory_history


@final
class Profile(Hook):
    """Profiles updates `first` to `last`, on each rank, into the folder `profile` of the run.

    Args:
        first: the first update that is profiled; the first few of a run are slower than the others.
        last: the last one.
        memory: whether each allocation on the device is recorded as well, which needs CUDA.

    Raises:
        ArgumentError: `first` is below 1, or `last` below `first`.

    >>> hook = Profile(first=10, last=13)
    """

    priority = -200  # around all other hooks
    failure_policy = "continue"  # a full disk is no reason to stop training

    def __init__(self, *, first: int, last: int, memory: bool = False) -> None:
        require_whole("first", first)
        require_whole("last", last)
        require_flag("memory", memory)
        if last < first:
            raise ArgumentError(f"`last` must be at least `first`, which is {first}, but is {last}; raise it.")
        self._first, self._last, self._memory = first, last, memory
        self._profiler: Any = None
        self._ranges = ExitStack()
        self._began_at = 0

    def check(self, updates: int | None) -> None:
        """Raise ArgumentError for a run of so many updates, if that is known, that ends before the profile begins."""
        if updates is not None and self._first > updates:
            raise ArgumentError(
                f"`first` must be one of the run's {updates} updates, but is {self._first}; profile earlier ones."
            )

    def before_train(self, event: TrainBegin) -> None:
        if self.trainer.folder is None:
            raise HookError("a profile is written into the run folder, but this run has none; give it a `folder`.")
        try:
            self.check(event.updates)
        except ArgumentError as error:
            raise HookError(str(error)) from error
        if self._memory and self._device.type != "cuda":
            raise HookError(
                f"`memory` of a profile needs a CUDA device, but the model is on {self._device}; leave it out there."
            )

    def before_update(self, event: UpdateBegin) -> None:
        if self._profiler is None and self._first <= event.update <= self._last:
            if profiler_runs():  # in torch a second one ends the process
                raise ArgumentError(
                    f"update {event.update} is not profiled, as another profiler of torch's runs; profile others."
                )
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
        table = {"updates": [self._began_at, update], "rank": self.trainer.rank, "device": str(self._device)}
        table |= _table(profiler.key_averages())
        replace_text(folder / f"{stem}.operators.json", json.dumps(table, indent=1) + "\n")


def _table(averages: Any) -> dict[str, Any]:
    """Operators and named ranges, the most time of their own first."""
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for one in averages:
        rows[bool(one.is_user_annotation)].append(
            {
                "name": one.key,
                "calls": one.count,
                "self_us": round(one.self_cpu_time_total, 1),
                "total_us": round(one.cpu_time_total, 1),
                "device_self_us": round(one.self_device_time_total, 1),
                "device_total_us": round(one.device_time_total, 1),
            }
        )
    for some in rows.values():
        some.sort(key=lambda row: -(row["self_us"] + row["device_self_us"]))
    return {"operators": rows[False], "ranges": rows[True]}


def span_of(text: str) -> tuple[int, int]:
    """The updates that a text such as "10:13" says, or a single one.

    Raises:
        ValueError: it says none.

    >>> span_of("10:13"), span_of("10")
    ((10, 13), (10, 10))
    """
    first, _, last = text.partition(":")
    return int(first), int(last or first)
