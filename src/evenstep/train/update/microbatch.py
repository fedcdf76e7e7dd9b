"""One set of micro-batches on its way through the stages of a model."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self, final

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from evenstep.data import Microbatch
from evenstep.data.tree import tensors_in
from evenstep.events import MicrobatchEvent
from evenstep.events.bus import SpanName
from evenstep.internals import profiler_runs, run_backward, unwrapped
from evenstep.keys import branch
from evenstep.pipeline.compiled import as_written
from evenstep.pipeline.layers import arguments
from evenstep.pipeline.stage import Stage
from evenstep.train.cut import SubBatch, part_of, whole_of
from evenstep.train.randomness import LOSS, branch_of
from evenstep.train.tasks.now import dummy_pass
from evenstep.train.tasks.task import Loss, Task, loss_of
from evenstep.train.update.context import TrainContext
from evenstep.train.update.weigh import Weights

Outputs = Mapping[int, Any]  # by the places of the layers that give them


class Observer(Protocol):
    """Takes outputs of the model, on the last stage."""

    def see(self, task: Task, output: Any, batch: Any) -> Any:
        """Compute something from an output, in the number formats of the forward; mostly the task's loss."""
        ...

    def take(self, task: Task, one: Microbatch, piece: SubBatch, seen: Any) -> Tensor | None:
        """Record what `see` gave for a piece of a micro-batch; gives the loss to go back from, or None."""
        ...


@final
class MicrobatchEvents:
    """Events of one set of micro-batches, each by its number in the plan."""

    def __init__(self, context: TrainContext, update: int) -> None:
        self._bus = context.bus
        self._update = update
        self._profiles = profiler_runs()
        self._observes_passes = self._profiles or context.bus.hears_passes
        self._open: dict[int, tuple[AbstractContextManager[None], dict[str, Any]]] = {}

    def begin(self, one: Microbatch, batch: Any, number: int) -> None:
        """A micro-batch enters a stage: its first, or another."""
        if not self._bus.hears_microbatches or number in self._open:
            return
        seen: dict[str, Any] = {}
        span = self._span("microbatch", one, batch, seen)
        span.__enter__()
        self._open[number] = span, seen

    def saw(self, number: int, output: Any, loss: Tensor | None) -> None:
        if number in self._open:
            self._open[number][1].update(output=output, loss=None if loss is None else loss.detach())

    def end(self, number: int, error: BaseException | None = None) -> None:
        if number in self._open:
            span, _ = self._open.pop(number)
            span.__exit__(*(type(error), error, error.__traceback__) if error else (None, None, None))

    def end_all(self, error: BaseException | None) -> None:
        for number in list(self._open):
            self.end(number, error)

    def forward(self, stage: Stage, one: Microbatch, batch: Any) -> AbstractContextManager[dict[str, Any] | None]:
        """Around a forward; gives a dict for its "output", if an event or a profiler is to have it."""
        return self._forward(stage, one, batch) if self._observes_passes else nullcontext()

    def backward(self, one: Microbatch) -> AbstractContextManager[None]:
        return self._backward(one) if self._observes_passes else nullcontext()

    @contextmanager
    def _forward(self, stage: Stage, one: Microbatch, batch: Any) -> Generator[dict[str, Any]]:
        seen: dict[str, Any] = {}
        span: AbstractContextManager[None] = nullcontext()
        if stage.is_whole:  # the output of one of several stages is not the model's
            span = self._span("forward", one, batch, seen)
        with span, self._range("forward", one.task):
            yield seen

    @contextmanager
    def _backward(self, one: Microbatch) -> Generator[None]:
        with self._span("backward", one, None, {}), self._range("backward", one.task):
            yield

    def _span(self, name: SpanName, one: Microbatch, batch: Any, seen: dict[str, Any]) -> AbstractContextManager[None]:
        event = MicrobatchEvent(update=self._update, microbatch=one.index, batch=batch, task=one.task)
        return self._bus.span(name, lambda: event, lambda error: replace(event, **seen))

    def _range(self, phase: str, task: str) -> AbstractContextManager[Any]:
        return record_function(f"{phase}/{task}" if task else phase) if self._profiles else nullcontext()


@final
class MicrobatchStep:
    """One set of micro-batches on its way through the stages of a model.

    Args:
        path: the key of the randomness, to which the micro-batch's number is added.
        update: number of the update, for events and coefficients.
        factor: of the gradient of each loss, besides its coefficient and its divisor.
        model: given to tasks that evaluate by themselves; None where the model is applied.

    Attributes:
        is_dummy: True for passes that count nowhere.
        work: this rank's micro-batches.
        acted: counts the time of the action that was just done.
        doing: the current action, or the one that raised: phase ("transfer", "forward", "backward"), number of the
            micro-batch, and piece.
    """

    def __init__(
        self,
        context: TrainContext,
        weights: Weights,
        observer: Observer,
        *,
        path: tuple[int | str, ...],
        update: int = 0,
        factor: float = 1.0,
        model: nn.Module | None = None,
        is_dummy: bool = False,
    ) -> None:
        self.is_dummy = is_dummy
        self.work = weights.work
        self.acted = context.phases.acted
        self.doing: tuple[str, int, SubBatch] | None = None
        self._context = context
        self._weights = weights
        self._observer = observer
        self._update = update
        self._factor = factor
        self._model = model
        self._branch = branch(context.seed, *path)
        self._parts: dict[int, tuple[Microbatch, SubBatch]] = {}
        self._completes: dict[int, int] | None = None  # where there are several pieces
        self._events = MicrobatchEvents(context, update)

    def lay_out(self, work: tuple[Microbatch, ...]) -> tuple[int, ...]:
        """Numbers of micro-batches in a plan, or of their pieces where one of them is cut."""
        tasks = self._context.tasks
        cuts = self._context.cuts
        pieces = [(one, piece) for one in work for piece in cuts.pieces(tasks[one.task], whole_of(one))]
        if len(pieces) == len(work):
            self._parts = {one.index: (one, piece) for one, piece in pieces}
        else:
            self._parts = dict(enumerate(pieces))
        if cuts.limit is not None:
            last = {one.index: number for number, (one, _) in self._parts.items()}
            self._completes = {number: index for index, number in last.items()}
        if pieces:
            first, piece = pieces[0]
            self.doing = "transfer", first.index, piece  # memory may run out before anything is computed here
        return tuple(self._parts)

    def forward(self, stage: Stage, received: Outputs, microbatch: int) -> tuple[Outputs, Tensor | None]:
        """Apply a stage; where it gives the output of the model, give that to the observer."""
        context = self._context
        one, piece = self._parts[microbatch]
        task = context.tasks[one.task]
        self.doing = "transfer", one.index, piece
        self._events.begin(one, piece.data, microbatch)
        batch = self._prepared(stage, one, piece)
        self.doing = "forward", one.index, piece
        if self._model is not None:
            return {}, self._observer.take(task, one, piece, self._evaluated(self._model, stage, one, batch))
        with context.precision.forward(context.device):
            with self._events.forward(stage, one, batch) as heard:
                inputs = context.inputs(task, batch) if stage.takes_inputs else None
                if stage.is_whole:
                    positional, named = arguments((), inputs, True)
                    outputs = {0: stage.module(*positional, **named)}
                else:
                    outputs = stage.module(received, inputs, context.randomness.seed_layer)
                if not stage.gives_loss:
                    return outputs, None
                output = self._output(task, outputs, batch)
                if heard is not None:
                    heard["output"] = output
            seen = self._observer.see(task, output, batch)
        total = self._observer.take(task, one, piece, seen)
        self._events.saw(microbatch, output, total)
        return {}, total

    def _evaluated(self, model: nn.Module, stage: Stage, one: Microbatch, batch: Any) -> Any:
        context = self._context
        heard = self._events.forward(stage, one, batch)
        with context.precision.forward(context.device), lent(model, context) as whole, heard:
            return context.tasks[one.task].evaluate(whole, batch)

    def _prepared(self, stage: Stage, one: Microbatch, piece: SubBatch) -> Any:
        context = self._context
        batch = piece.data if stage.takes_batch else None
        if stage.takes_batch and context.transfer is not None:
            batch = context.transfer(batch)
            context.phases.lap("transfer")
        context.randomness.begin(context.device, branch_of(self._branch, one.index, piece.path))
        if stage.takes_batch:
            batch = context.tasks[one.task].transform(batch)
            if context.reorder is not None:
                batch = context.reorder(batch)
        return batch

    def _output(self, task: Task, outputs: Outputs, batch: Any) -> Any:
        context = self._context
        if context.randomness.by_layer:
            context.randomness.seed_layer(LOSS)
        (output,) = outputs.values()
        return context.output(task, output, batch)

    def backward(self, loss: Tensor, microbatch: int) -> None:
        """Go back from the loss of a micro-batch, by its number in the plan."""
        one, piece = self._parts[microbatch]
        self.doing = "backward", one.index, piece
        with self._events.backward(one):
            # the engine itself: `torch.autograd.backward` first looks at the gradient, which costs three kernels
            run_backward(loss, self._seed_of(loss, one))

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        """Around the backward of a stage that gives no loss."""
        one, piece = self._parts[microbatch]
        self.doing = "backward", one.index, piece
        return self._events.backward(one)

    def done(self, microbatch: int) -> None:
        """This rank has nothing more to compute of the micro-batch."""
        self._events.end(microbatch)

    def completed(self, microbatch: int) -> int | None:
        return microbatch if self._completes is None else self._completes.get(microbatch)

    def _seed_of(self, loss: Tensor, one: Microbatch) -> Tensor:
        coefficient = self._context.coefficients.value(one.task, self._update)
        factor = self._factor * coefficient / self._weights.divisors[one.task]
        kept = self._context.seeds.get(loss.dtype)
        if kept is None or kept[0] != factor:
            kept = factor, loss.new_full((), factor)
            self._context.seeds[loss.dtype] = kept
        return kept[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.randomness.in_pass = False
        self._events.end_all(error)


@contextmanager
def dummy_step(context: TrainContext, microbatch: Microbatch) -> Generator[MicrobatchStep]:
    """One micro-batch that counts nowhere, or its first piece: other ranks need its collectives beside theirs."""
    first = context.cuts.pieces(context.tasks[microbatch.task], whole_of(microbatch))[0]
    one = replace(part_of(microbatch, first), index=0)
    weights = Weights.of_one(one, weight=0.0)
    step = MicrobatchStep(context.silently(), weights, _NoLoss(), path=("unseen",), factor=0.0, is_dummy=True)
    with dummy_pass(), step:
        yield step


class _NoLoss:
    """Observer of dummy passes: goes back from all outputs, with gradients of 0, and calls no loss.

    Only a model whose outputs hide their tensors in objects of its own is given to the loss.
    """

    def see(self, task: Task, output: Any, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        trained = [one.sum(dtype=torch.float32) for one in tensors_in(output) if one.requires_grad]
        return sum(trained[1:], trained[0]) if trained else loss_of(task, output, batch)

    def take(self, task: Task, one: Microbatch, piece: SubBatch, seen: Any) -> Tensor | None:
        return seen.sum if isinstance(seen, Loss) else seen


@contextmanager
def lent(model: nn.Module, context: TrainContext) -> Generator[nn.Module]:
    """The model as a task may call it, to generate with it instead of only applying it.

    It is called as in an evaluation: in the run's number formats, on the device, without gradients, and as written
    where it is compiled; autocast is the caller's. It takes part in no sum over ranks, so each rank may call it as
    often as its batches need.
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
