"""Micro-batches on their way through the stages of a model, and the values that all of a run share."""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from evenstep.data import Microbatch
from evenstep.data.tree import is_container, rebuilt, tensors_in
from evenstep.events import Bus, Incident, MicrobatchEvent, Storage
from evenstep.events.bus import SpanName
from evenstep.internals import run_backward, unwrapped
from evenstep.keys import branch
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.pipeline.stage import Stage
from evenstep.precision import LossScale, Precision
from evenstep.train.cut import SplitLimit
from evenstep.train.randomness import LOSS, Randomness, branch_of
from evenstep.train.tasks.task import Loss, Task, dummy_pass, loss_of
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


_NOTHING: Mapping[str, Any] = {}
Outputs = Mapping[int, Any]  # by the places of the layers that give them
See: TypeAlias = Callable[[Task, Any, Any], Any]
"""Computes something from the model's output for a batch, in the number formats of the forward."""
Take: TypeAlias = Callable[[Task, Microbatch, Any], Tensor | None]
"""Records the result of a `See` for a micro-batch, or a piece of one; gives the loss to go back from, or None."""


@final
class MicrobatchStep:
    """One set of micro-batches on its way through the stages of a model.

    Args:
        work: this rank's micro-batches.
        take: called on the last stage, with the result of `see`.
        path: the key of the randomness, to which the micro-batch's number is added.
        update: number of the update, for events.
        factors: of the gradient of each task's loss.
        model: given to tasks that evaluate by themselves; None where the model is applied.
        is_dummy: True for passes that count nowhere.

    Attributes:
        pieces: the micro-batches, or what they are cut into, by their numbers in a plan.
        acted: counts the time of the action that was just done.
        doing: the current action, or the one that raised: phase ("transfer", "forward", "backward") and micro-batch.
    """

    def __init__(
        self,
        context: TrainContext,
        work: tuple[Microbatch, ...],
        take: Take,
        *,
        see: See = loss_of,
        path: tuple[int | str, ...],
        update: int = 0,
        factors: Mapping[str, float] | None = None,
        model: nn.Module | None = None,
        is_dummy: bool = False,
    ) -> None:
        self.context = context
        self.work = work
        self.model = model
        self.is_dummy = is_dummy
        self.acted = context.phases.acted
        self._see = see
        self._take = take
        self._update = update
        self._factors = factors or {}
        self._branch = branch(context.seed, *path)
        self._open: dict[int, tuple[AbstractContextManager[None], dict[str, Any]]] = {}  # events of micro-batches
        self._completes: dict[int, int] | None = None  # where there are several pieces
        self.pieces = {one.index: one for one in work}
        if context.cuts.limit is not None:
            self._cut()
        # memory may run out before anything is computed here
        self.doing: tuple[str, Microbatch] | None = next((("transfer", one) for one in self.pieces.values()), None)

    def _cut(self) -> None:
        context = self.context
        pieces = [piece for one in self.work for piece in context.cuts.pieces(context.tasks[one.task], one)]
        if len(pieces) > len(self.work):
            self.pieces = dict(enumerate(pieces))
        last = {one.index: number for number, one in self.pieces.items()}
        self._completes = {number: index for index, number in last.items()}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers in a plan."""
        return tuple(self.pieces)

    def forward(self, stage: Stage, received: Outputs, microbatch: int) -> tuple[Outputs, Tensor | None]:
        """Apply a stage; where it gives the output of the model, take the loss of that."""
        context = self.context
        one = self.pieces[microbatch]
        task = context.tasks[one.task]
        self.doing = "transfer", one
        if context.bus.hears_microbatches and microbatch not in self._open:
            self._begin_event(microbatch, one)
        batch = self._prepared(stage, task, one)
        self.doing = "forward", one
        seen: dict[str, Any] = self._open[microbatch][1] if microbatch in self._open else {}
        # the output of one of several stages is not the model's
        is_heard = stage.is_whole and context.bus.hears_passes
        heard = self._span("forward", one, batch, seen) if is_heard else nullcontext()
        if self.model is not None:
            with context.precision.forward(context.device), lent(self.model, context) as whole, heard:
                found = task.evaluate(whole, batch)
            return {}, self._take(task, one, found)
        with context.precision.forward(context.device):
            with heard:
                inputs = context.inputs(task, batch) if stage.takes_inputs else None
                if stage.is_whole:
                    positional, named = arguments((), inputs, True)
                    outputs = {0: stage.module(*positional, **named)}
                else:
                    outputs = stage.module(received, inputs, context.randomness.seed_layer)
                if not stage.gives_loss:
                    return outputs, None
                if context.randomness.by_layer:
                    context.randomness.seed_layer(LOSS)
                (output,) = outputs.values()
                seen["output"] = output = context.output(output)
            found = self._see(task, output, batch)
        total = self._take(task, one, found)
        if microbatch in self._open:
            seen["loss"] = None if total is None else total.detach()
        return {}, total

    def _prepared(self, stage: Stage, task: Task, one: Microbatch) -> Any:
        context = self.context
        batch: Any = one.data if stage.takes_batch else None
        if stage.takes_batch and context.transfer is not None:
            batch = context.transfer(batch)
            context.phases.lap("transfer")
        context.randomness.begin(branch_of(self._branch, one.index, one.part))
        if not stage.takes_batch:
            return None
        return task.transform(batch)

    def backward(self, loss: Tensor, microbatch: int) -> None:
        """Go back from the loss of a micro-batch, by its number in the plan."""
        factor, seeds = self._factors[self.pieces[microbatch].task], self.context.seeds
        kept = seeds.get(loss.dtype)
        if kept is None or kept[0] != factor:
            kept = seeds[loss.dtype] = factor, loss.new_full((), factor)
        with self.going_back(microbatch):
            # the engine itself: `torch.autograd.backward` first looks at the gradient, which costs three kernels
            run_backward(loss, kept[1])

    def going_back(self, microbatch: int) -> AbstractContextManager[Any]:
        """Around the backward of a stage."""
        one = self.pieces[microbatch]
        self.doing = "backward", one
        return self._span("backward", one) if self.context.bus.hears_passes else nullcontext()

    def done(self, microbatch: int) -> None:
        """This rank has nothing more to compute of the micro-batch."""
        if microbatch in self._open:
            self._open.pop(microbatch)[0].__exit__(None, None, None)

    def completed(self, microbatch: int) -> int | None:
        return microbatch if self._completes is None else self._completes.get(microbatch)

    def _begin_event(self, number: int, one: Microbatch) -> None:
        seen: dict[str, Any] = {}
        span = self._span("microbatch", one, one.data, seen)
        span.__enter__()
        self._open[number] = span, seen

    def _span(
        self, name: SpanName, one: Microbatch, batch: Any = None, seen: Mapping[str, Any] = _NOTHING
    ) -> AbstractContextManager[None]:
        def event(error: BaseException | None = None) -> MicrobatchEvent:
            return MicrobatchEvent(update=self._update, microbatch=one.index, batch=batch, task=one.task, **seen)

        return self.context.bus.span(name, event, event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.context.randomness.in_pass = False
        for number in list(self._open):
            self._open.pop(number)[0].__exit__(kind, error, traceback)


@contextmanager
def dummy_step(context: TrainContext, piece: Microbatch) -> Generator[MicrobatchStep]:
    """One micro-batch or piece that counts nowhere: other ranks need its collectives beside theirs."""
    one = replace(piece, index=0, part=())
    factors = {one.task: 0.0}
    step = MicrobatchStep(
        context.silently(), (one,), _trained, see=_summed, path=("unseen",), factors=factors, is_dummy=True
    )
    with dummy_pass(), step:
        yield step


def _summed(task: Task, output: Any, batch: Any) -> Any:
    """Something to go back from through all outputs; no loss is called unless they hide their tensors."""
    if not torch.is_grad_enabled():
        return None
    trained = [one.sum(dtype=torch.float32) for one in tensors_in(output) if one.requires_grad]
    return sum(trained[1:], trained[0]) if trained else loss_of(task, output, batch)


def _trained(task: Task, one: Microbatch, seen: Any) -> Tensor | None:
    return seen.sum if isinstance(seen, Loss) else seen


@contextmanager
def lent(model: nn.Module, context: TrainContext) -> Generator[nn.Module]:
    """The model as a task may call it in its `evaluate`, in the run's number formats, and as written.

    It takes part in no sum over ranks, so each rank may call it as often as its batches need.
    """
    whole = unwrapped(model)
    cast_inputs, cast_outputs = context.cast_inputs, context.cast_outputs
    handles: list[Any] = []
    if cast_inputs is not None:
        handles.append(
            whole.register_forward_pre_hook(lambda _, args, named: cast_inputs((args, named)), with_kwargs=True)
        )
    if cast_outputs is not None:
        handles.append(whole.register_forward_hook(lambda _, args, output: cast_outputs(output)))
    try:
        with as_written(), context.randomness.unkeyed():
            yield whole
    finally:
        for handle in handles:
            handle.remove()
