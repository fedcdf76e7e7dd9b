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
        self._profiles = profiler_runs()
        self._observes_passes = self._profiles or context.bus.hears_passes
        self._open: dict[int, tuple[AbstractContextManager[None], dict[str, Any]]] = {}  # events of micro-batches

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
        if context.bus.hears_microbatches and microbatch not in self._open:
            self._begin_event(microbatch, one, piece)
        batch = self._prepared(stage, one, piece)
        self.doing = "forward", one.index, piece
        heard = self._observed("forward", one, batch, stage) if self._observes_passes else nullcontext()
        if self._model is not None:
            with context.precision.forward(context.device), lent(self._model, context) as whole, heard:
                seen = task.evaluate(whole, batch)
            return {}, self._observer.take(task, one, piece, seen)
        with context.precision.forward(context.device):
            with heard as known:
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
                output = context.output(task, output, batch)
                if known is not None:
                    known["output"] = output
            seen = self._observer.see(task, output, batch)
        total = self._observer.take(task, one, piece, seen)
        if microbatch in self._open:
            self._open[microbatch][1].update(output=output, loss=None if total is None else total.detach())
        return {}, total

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

    def backward(self, loss: Tensor, microbatch: int) -> None:
        """Go back from the loss of a micro-batch, by its number in the plan."""
        with self.going_back(microbatch):
            # the engine itself: `torch.autograd.backward` first looks at the gradient, which costs three kernels
            run_backward(loss, self._seed_of(loss, self._parts[microbatch][0]))

    def going_back(self, microbatch: int) -> AbstractContextManager[Any]:
        """Around the backward of a stage."""
        one, piece = self._parts[microbatch]
        self.doing = "backward", one.index, piece
        return self._observed("backward", one) if self._observes_passes else nullcontext()

    def done(self, microbatch: int) -> None:
        """This rank has nothing more to compute of the micro-batch."""
        if microbatch in self._open:
            self._open.pop(microbatch)[0].__exit__(None, None, None)

    def completed(self, microbatch: int) -> int | None:
        return microbatch if self._completes is None else self._completes.get(microbatch)

    def _begin_event(self, number: int, one: Microbatch, piece: SubBatch) -> None:
        seen: dict[str, Any] = {}
        span = self._span("microbatch", one, piece.data, seen)
        span.__enter__()
        self._open[number] = span, seen

    @contextmanager
    def _observed(
        self, phase: SpanName, one: Microbatch, batch: Any = None, stage: Stage | None = None
    ) -> Generator[dict[str, Any]]:
        """Events and profiles of a pass; gives a dict for the "output" of a forward."""
        seen: dict[str, Any] = {}
        is_of_model = stage is None or stage.is_whole  # the output of one of several stages is not the model's
        span = self._span(phase, one, batch, seen) if is_of_model else nullcontext()
        name = f"{phase}/{one.task}" if one.task else phase
        with span, record_function(name) if self._profiles else nullcontext():
            yield seen

    def _span(self, name: SpanName, one: Microbatch, batch: Any, seen: dict[str, Any]) -> AbstractContextManager[None]:
        event = MicrobatchEvent(update=self._update, microbatch=one.index, batch=batch, task=one.task)
        return self._context.bus.span(name, lambda: event, lambda error: replace(event, **seen))

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
        for number in list(self._open):
            self._open.pop(number)[0].__exit__(kind, error, traceback)


@contextmanager
def dummy_step(context: TrainContext, microbatch: Microbatch) -> Generator[MicrobatchStep]:
    """One micro-batch that counts nowhere, or its first piece: other ranks need its collectives beside theirs."""
    first = context.cuts.pieces(context.tasks[microbatch.task], whole_of(microbatch))[0]
    one = replace(part_of(microbatch, first), index=0)
    weights = Weights.of_forwards(one.task, (one,), num_microbatches=1, weight=0.0)
    step = MicrobatchStep(context.silently(), weights, _NoLoss(), path=("unseen",), factor=0.0, is_dummy=True)
    with dummy_pass(), step:
        yield step


class _NoLoss:
    """Observer of dummy passes: goes back from all outputs, and calls no loss unless they hide their tensors."""

    def see(self, task: Task, output: Any, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        trained = [one.sum(dtype=torch.float32) for one in tensors_in(output) if one.requires_grad]
        return sum(trained[1:], trained[0]) if trained else loss_of(task, output, batch)

    def take(self, task: Task, one: Microbatch, piece: SubBatch, seen: Any) -> Tensor | None:
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
