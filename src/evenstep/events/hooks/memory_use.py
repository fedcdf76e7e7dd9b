"""How much memory a run takes, over windows of updates, in bytes.

    perf/memory_peak_bytes      CUDA: the most that tensors held in the window; else the most that the process ever held
    perf/memory_reserved_bytes  CUDA: what torch's allocator holds of the device, in use or kept for later
    perf/memory_free_bytes      CUDA: what nobody holds of the device
    perf/memory_resident_bytes  else: what the process holds now (where there is a /proc, as on Linux)

On several ranks each value is that of the rank with the most, or with the least that is free. It asks the allocator's
own counters, so nothing waits for the device, and sets back torch's peak, as `reset_peak_memory_stats` does.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch

from evenstep.events.event import TrainBegin, TrainEnd, UpdateEnd
from evenstep.events.hook import Hook

_OF_RANKS: Final[Mapping[str, Callable[..., Any]]] = {
    "perf/memory_peak_bytes": max,
    "perf/memory_reserved_bytes": max,
    "perf/memory_resident_bytes": max,
    "perf/memory_free_bytes": min,
}
_STATM = Path("/proc/self/statm")


@final
class MemoryUse(Hook):
    """Logs how much memory is used and free.

    Args:
        every_updates: the number of updates in a window, after which values are logged; also at the end of the run.

    >>> hook = MemoryUse(every_updates=50)
    """

    def __init__(self, *, every_updates: int = 10) -> None:
        self._every = every_updates
        self._device = torch.device("cpu")
        self._at = 0

    def before_train(self, event: TrainBegin) -> None:
        self._device = next((one.device for one in self.trainer.model.parameters()), self._device)
        self._at = event.update

    def after_update(self, event: UpdateEnd) -> None:
        if event.committed and event.update % self._every == 0:
            self._put(event.update)

    def after_train(self, event: TrainEnd) -> None:
        if event.outcome != "failed" and event.update > self._at:
            self._put(event.update)

    def _put(self, update: int) -> None:
        self._at = update
        taken = _of_device(self._device) if self._device.type == "cuda" else _of_process()
        for name, size in taken.items():
            self.trainer.storage.put(f"perf/memory_{name}_bytes", float(size), update=update)


def _of_device(device: torch.device) -> dict[str, int]:
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    free, _ = torch.cuda.mem_get_info(device)
    return {"peak": peak, "reserved": torch.cuda.memory_reserved(device), "free": free}


def _of_process() -> dict[str, int]:
    import resource  # which is not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    taken = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    with suppress(FileNotFoundError), _STATM.open("rb", buffering=0) as file:
        taken["resident"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return taken


def only_extremes(everybody: Sequence[Mapping[tuple[int, str], Any]]) -> list[Mapping[tuple[int, str], Any]]:
    """Of each of these metrics only the pair of the rank that has the most, or the least that is free.

    Args:
        everybody: the pairs (sum, weight) of all metrics under (update, name), by rank.

    >>> only_extremes([{(1, "perf/memory_free_bytes"): (8.0, 1.0)}, {(1, "perf/memory_free_bytes"): (4.0, 1.0)}])
    [{}, {(1, 'perf/memory_free_bytes'): (4.0, 1.0)}]
    """
    if len(everybody) == 1:
        return list(everybody)
    best: dict[tuple[int, str], int] = {}
    for key in {key for theirs in everybody for key in theirs if key[1] in _OF_RANKS}:
        values = {rank: theirs[key][0] for rank, theirs in enumerate(everybody) if key in theirs}
        best[key] = _OF_RANKS[key[1]](values, key=values.__getitem__)
    return [
        {key: pair for key, pair in theirs.items() if best.get(key, rank) == rank}
        for rank, theirs in enumerate(everybody)
    ]
