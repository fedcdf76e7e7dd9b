"""Hooks that log speed, memory, and norms of parameters and gradients."""

import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from time import time
from typing import Any, final

import torch
from torch import Tensor

from evenstep.events.event import StepEvent, TrainEvent, UpdateEvent
from evenstep.events.hook import Hook
from evenstep.schema import Count
from evenstep.tensors import named_parameters

_PEAK = "perf/memory_peak_bytes"


@final
class Timer(Hook):
    """Logs times, rates and memory of windows of `every_updates` updates, without evaluations and checkpoints.

        perf/update_s, perf/samples_per_s    seconds per committed update, samples per second
        perf/data_s, perf/forward_s, …       seconds of each phase per update
        perf/time, progress/samples          end of the window in seconds since 1970, samples of all updates so far
        perf/memory_peak_bytes               of the rank that needed most: on CUDA the most that tensors held since the
                                             last value, so torch's peak is reset; else the most of the process so far

    It never waits for a device, so a window should be longer than a few updates.

    >>> hook = Timer(every_updates=50)
    """

    priority = -100  # the time of other hooks counts
    draws = False

    def __init__(self, *, every_updates: Count = 10) -> None:
        self._every = every_updates
        self._updates = 0
        self._samples = 0

    def before_train(self, event: TrainEvent) -> None:
        self.trainer.engine.phases.take()
        self._updates = 0
        self._samples = 0

    def after_update(self, event: UpdateEvent) -> None:
        if event.committed:
            self._updates += 1
            self._samples += event.num_samples
            if event.update % self._every == 0:
                self._put(event.update)

    def after_train(self, event: TrainEvent) -> None:
        if event.outcome != "failed" and self._updates:
            self._put(event.update)

    def _put(self, update: int) -> None:
        phases = self.trainer.engine.phases.take()
        seconds = sum(phases.values()) - phases["evaluate"] - phases["save"]
        values = {
            "perf/time": (time(), 1),
            "progress/samples": (self.trainer.progress.samples, 1),
            _PEAK: (_peak_bytes(self.trainer.model), 1),
            "perf/update_s": (seconds, self._updates),
            "perf/samples_per_s": (self._samples, seconds),
            **{f"perf/{name}_s": (spent, self._updates) for name, spent in phases.items() if spent},
        }
        for name, (total, weight) in values.items():
            self.trainer.storage.put(name, total, weight, update=update)
        self._updates = 0
        self._samples = 0


def _peak_bytes(model: torch.nn.Module) -> int:
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def only_largest_peaks(everybody: Sequence[Mapping[tuple[int, str], Any]]) -> list[Mapping[tuple[int, str], Any]]:
    """Pairs (sum, weight) of all ranks, with the memory of the rank that needed most in place of each rank's."""
    largest: dict[tuple[int, str], int] = {}
    for rank, theirs in enumerate(everybody):
        for key in theirs:
            if key[1] == _PEAK and theirs[key][0] > everybody[largest.setdefault(key, rank)][key][0]:
                largest[key] = rank
    return [
        {key: pair for key, pair in theirs.items() if largest.get(key, rank) == rank}
        for rank, theirs in enumerate(everybody)
    ]


@final
class Statistics(Hook):
    """Logs train/lr/i, train/param_norm/i = ‖θ‖₂ and train/update_ratio/i = ‖θ_u − θ_{u−1}‖₂ / ‖θ_u‖₂ of group i.

    Also train/grad_norm/LAYER = ‖g‖₂ over the parameters of the module of that name, before clipping. Norms are those
    of the whole model, over shards and stages, and stay on the device until metrics are read.

    Args:
        every_updates: period in updates.
        update_ratio: log the ratio, which needs a copy of the parameters during the update.
        gradient_norms: log the norms of the layers' gradients.

    >>> hook = Statistics(every_updates=100, gradient_norms=True)
    """

    draws = False

    def __init__(self, *, every_updates: Count = 100, update_ratio: bool = False, gradient_norms: bool = False) -> None:
        self._every = every_updates
        self._before: list[dict[str, Tensor]] = []
        # the methods of the base are not called
        if not update_ratio:
            self.before_update = super().before_update
        if not gradient_norms:
            self.before_step = super().before_step

    def before_update(self, event: UpdateEvent) -> None:
        if event.update % self._every == 0:
            self._before = [{name: one.clone() for name, one in group.items()} for group in self._groups()]

    def before_step(self, event: StepEvent) -> None:
        if event.update % self._every:
            return
        parameters = named_parameters(self.trainer.model)
        gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        layers: dict[str, list[Tensor]] = {}
        for name, norm in self.trainer.engine.norms(gradients).items():
            layers.setdefault(name.rpartition(".")[0] or name, []).append(norm)
        for layer, norms in layers.items():
            self.trainer.storage.put(f"train/grad_norm/{layer}", _norm(norms) / event.divisor, update=event.update)

    def after_update(self, event: UpdateEvent) -> None:
        before = self._before
        self._before = []
        if not event.committed or event.update % self._every:
            return
        put = self.trainer.storage.put
        for number, group in enumerate(self._groups()):
            rate = self.trainer.optimizer.param_groups[number].get("lr")
            if rate is not None:
                put(f"train/lr/{number}", rate, update=event.update)
            norm = _norm(self.trainer.engine.norms(group).values())
            put(f"train/param_norm/{number}", norm, update=event.update)
            if before:
                changes = {name: new - before[number][name] for name, new in group.items()}
                change = _norm(self.trainer.engine.norms(changes).values())
                put(f"train/update_ratio/{number}", change, norm, update=event.update)

    def _groups(self) -> list[dict[str, Tensor]]:
        parameters = named_parameters(self.trainer.model)
        groups = self.trainer.engine.parts.core.trained.names
        return [{name: parameters[name].detach() for name in names} for names in groups]


def _norm(norms: Iterable[Tensor]) -> Tensor:
    parts = list(norms)
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros(())
