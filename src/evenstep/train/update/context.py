"""Values that all micro-batches of a run share, and results of an update after they have run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from evenstep.events import Bus, Incident, Storage
from evenstep.precision import LossScale, Precision
from evenstep.train.cut import SplitLimit
from evenstep.train.randomness import Randomness
from evenstep.train.tasks.task import Task
from evenstep.train.tasks.weighting import Coefficients, Fixed
from evenstep.train.timing import Phases


def _ignore(incident: Incident) -> None:
    pass


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """Values that all micro-batches of a run share.

    Args:
        tasks: by name; "" is that of a run with one task without a name.
        transfer: moves a batch to the device; None, here and below, where there is nothing to do.
        reorder: puts a transformed batch into the model's memory format.
        cast_inputs, cast_outputs: change the number format of what goes into the model, and of what it gives.
        frozen_norms: normalisation layers that stay in evaluation mode.
        seeds: the last factors of backwards, as tensors, which the next ones mostly share.
        cuts: largest micro-batch that fits into this rank's memory.
        report: takes incidents, such as lack of memory.
    """

    tasks: Mapping[str, Task]
    precision: Precision
    device: torch.device
    transfer: Callable[[Any], Any] | None
    storage: Storage
    bus: Bus
    seed: int
    reorder: Callable[[Any], Any] | None = None
    cast_inputs: Callable[[Any], Any] | None = None
    cast_outputs: Callable[[Any], Any] | None = None
    coefficients: Coefficients = field(default_factory=Fixed)
    loss_scale: LossScale = field(default_factory=LossScale)
    frozen_norms: tuple[nn.Module, ...] = ()
    randomness: Randomness = field(default_factory=Randomness)
    seeds: dict[torch.dtype, tuple[float, Tensor]] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)
    cuts: SplitLimit = field(default_factory=SplitLimit)
    report: Callable[[Incident], None] = _ignore

    def inputs(self, task: Task, batch: Any) -> Any:
        """The inputs of the model, in its number format."""
        given = task.inputs(batch)
        return given if self.cast_inputs is None else self.cast_inputs(given)

    def output(self, task: Task, output: Any, batch: Any) -> Any:
        """The model's output as the task's loss takes it."""
        given = output if self.cast_outputs is None else self.cast_outputs(output)
        return task.postprocess(given, batch)

    def silently(self) -> "TrainContext":
        """The same without hooks, records and incidents, for micro-batches that are not cut."""
        return replace(self, storage=Storage(), bus=Bus((), cast("Any", None)), cuts=SplitLimit(), report=_ignore)


@final
@dataclass(slots=True)
class MicrobatchResults:
    """Results of an update's micro-batches on this rank.

    Args:
        late_total: Σw_m over all ranks where the weights are late, to divide by; else None.
        total: Σw_m of all tasks, where the late part is already divided; else None.
        losses: the summed losses with the names of their tasks, by the micro-batches' numbers.
    """

    late_total: Tensor | None = None
    total: Tensor | None = None
    losses: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
