"""Values that all micro-batches of a run share, and how their batches come into the model's device and formats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.data.tree import is_container, rebuilt
from evenstep.events import Bus, Incident, Storage
from evenstep.precision import LossScale, Precision
from evenstep.train.cut import SplitLimit
from evenstep.train.randomness import Randomness
from evenstep.train.tasks.task import Task
from evenstep.train.tasks.weighting import Coefficients
from evenstep.train.timing import Phases

Change: TypeAlias = Callable[[Any], Any]


def _ignore(incident: Incident) -> None: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainContext:
    """Values that all micro-batches of a run share.

    Args:
        tasks: by name; "" is that of a run with one task without a name.
        transfer: moves a batch to the device; None, here and below, where there is nothing to do.
        cast_inputs, cast_outputs: change the number format of what goes into the model, and of what it gives.
        seeds: the last factors of backwards, as tensors, which the next ones mostly share.
        cuts: largest micro-batch that fits into this rank's memory.
        report: takes incidents, such as lack of memory.
    """

    tasks: Mapping[str, Task]
    precision: Precision
    device: torch.device
    transfer: Change | None
    storage: Storage
    bus: Bus
    seed: int
    randomness: Randomness
    cast_inputs: Change | None
    cast_outputs: Change | None
    coefficients: Coefficients
    loss_scale: LossScale
    seeds: dict[torch.dtype, tuple[float, Tensor]] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)
    cuts: SplitLimit
    report: Callable[[Incident], None]

    def inputs(self, task: Task, batch: Any) -> Any:
        """The inputs of the model, in its number format."""
        given = task.inputs(batch)
        return given if self.cast_inputs is None else self.cast_inputs(given)

    def output(self, output: Any) -> Any:
        """The model's output in the number format that the task's loss takes."""
        return output if self.cast_outputs is None else self.cast_outputs(output)

    def silently(self) -> "TrainContext":
        """The same without hooks, records and incidents, for micro-batches that are not cut."""
        return replace(self, storage=Storage(), bus=Bus((), cast("Any", None)), cuts=SplitLimit(), report=_ignore)


def build_transfer(device: torch.device) -> Change | None:
    """The function that moves a batch to `device`; None for the CPU, where loaders give batches."""
    if device.type == "cpu":
        return None

    def transfer(item: Any) -> Any:
        # of a packed sequence, a named tuple, one tensor must stay on the CPU
        if isinstance(item, Tensor | PackedSequence):
            return cast("Any", item).to(device, non_blocking=True)
        if callable(getattr(item, "to", None)) and not isinstance(item, Mapping | tuple | list):
            return item.to(device)
        return rebuilt(item, transfer) if is_container(item) else item

    return transfer


def build_cast(format: torch.dtype | None) -> Change | None:
    """The function that casts the floating tensors of anything to `format`; None leaves them, and gives None."""
    if format is None:
        return None

    def cast_all(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.to(format) if item.is_floating_point() else item
        if isinstance(item, PackedSequence):
            return item._replace(data=cast_all(item.data))
        return rebuilt(item, cast_all) if is_container(item) else item

    return cast_all
