"""Memory of a run over windows of updates, in bytes.

    perf/memory_peak_bytes      CUDA: most that tensors held in the window; else most that the process ever held
    perf/memory_reserved_bytes  CUDA: held by torch's allocator, in use or kept for later
    perf/memory_free_bytes      CUDA: held by nobody
    perf/memory_resident_bytes  else: held by the process now (where there is a /proc)

On several ranks each value is that of the rank with the most, or with the least free memory.
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
from evenstep.schema import Count

_OF_RANKS: Final[Mapping[str, Callable[..., Any]]] = {
    "perf/memory_peak_bytes": max,
    "perf/memory_reserved_bytes": max,
    "perf/memory_resident_bytes": max,
    "perf/memory_free_bytes": min,
}
_STATM = Path("/proc/self/statm")


@final
class MemoryUse(Hook):
    """Logs used and free memory. It resets torch's peak, as `reset_peak_memory_stats` does.

    Args:
        every_updates: updates in a window; the end of the run ends the last one.

    >>> hook = MemoryUse(every_updates=50)
    """

    draws = False
    may_evaluate = False

    def __init__(self, *, every_updates: Count = 10) -> None:
        self._every = every_updates
        self._device = torch.device("cpu")
        self._put_at = 0

    def before_train(self, event: TrainBegin) -> None:
        self._device = next((one.device for one in self.trainer.model.parameters()), self._device)
        self._put_at = event.update

    def after_update(self, event: UpdateEnd) -> None:
        if event.committed and event.update % self._every == 0:
            self._put(event.update)

    def after_train(self, event: TrainEnd) -> None:
        if event.outcome != "failed" and event.update > self._put_at:
            self._put(event.update)

    def _put(self, update: int) -> None:
        self._put_at = update
        sizes = _of_device(self._device) if self._device.type == "cuda" else _of_process()
        for name, size in sizes.items():
            self.trainer.storage.put(f"perf/memory_{name}_bytes", float(size), update=update)


def _of_device(device: torch.device) -> dict[str, int]:
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    free, _ = torch.cuda.mem_get_info(device)
    return {"peak": peak, "reserved": torch.cuda.memory_reserved(device), "free": free}


def _of_process() -> dict[str, int]:
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    sizes = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    with suppress(FileNotFoundError), _STATM.open("rb", buffering=0) as file:
        sizes["resident"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return sizes


def only_extremes(everybody: Sequence[Mapping[tuple[int, str], Any]]) -> list[Mapping[tuple[int, str], Any]]:
    """Pairs of all ranks, but of these metrics only the pair of the rank with the extreme value.

    Args:
        everybody: pairs (sum, weight) under (update, name), by rank.

    >>> only_extremes([{(1, "perf/memory_free_bytes"): (8.0, 1.0)}, {(1, "perf/memory_free_bytes"): (4.0, 1.0)}])
    [{}, {(1, 'perf/memory_free_bytes'): (4.0, 1.0)}]
    """
    extreme: dict[tuple[int, str], int] = {}
    for key in {key for theirs in everybody for key in theirs if key[1] in _OF_RANKS}:
        values = {rank: theirs[key][0] for rank, theirs in enumerate(everybody) if key in theirs}
        extreme[key] = _OF_RANKS[key[1]](values, key=values.__getitem__)
    return [
        {key: pair for key, pair in theirs.items() if extreme.get(key, rank) == rank}
        for rank, theirs in enumerate(everybody)
    ]
