"""One set of micro-batches on its way through the model."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, final

from torch import Tensor, nn

from evenstep.data import Microbatch
from evenstep.internals import run_backward, unwrapped
from evenstep.keys import branch
from evenstep.pipeline import Stage
from evenstep.pipeline.compiled import as_written
from evenstep.train.cut import SubBatch, part_of, whole_of
from evenstep.train.randomness import LOSS, branch_of
from evenstep.train.tasks.task import evaluates_itself, loss_of
from evenstep.train.update.context import TrainContext
from evenstep.train.update.microbatch_events import MicrobatchEvents
from evenstep.train.update.recording import Recording
from evenstep.train.update.weigh import Weights

Outputs = Mapping[int, Any]  # by the places of the layers that give them


@final
class MicrobatchStep:
    """One set of micro-batches on its way through the stages of a model.

    Args:
        path: the key of the randomness, to which the micro-batch's number is added.
        update: number of the update that metrics are recorded under.
        factor: what the gradient of each loss is multiplied by, beside its coefficient and after its divisor.
        prefix: of the metrics' names.
        model: given to tasks that evaluate by themselves; None where that is not asked.

    Attributes:
        is_dummy: whether they count nowhere, and run only because those of other ranks do.
        work: this rank's micro-batches.
        gathered: what is known of the micro-batches that have run.
        late_weights: the weights that came with losses, by the micro-batches' numbers.
        acted: counts the time of what was just done.
        doing: what it does now, or did when something was raised: the phase ("transfer", "forward", "backward"), the
            micro-batch's number, and the piece.
    """

    def __init__(
        self,
        context: TrainContext,
        weights: Weights,
        *,
        path: tuple[int | str, ...],
        update: int = 0,
        factor: float = 1.0,
        prefix: str = "",
        model: nn.Module | None = None,
    ) -> None:
        self.is_dummy, self._model = False, model
        self._context, self._weights = context, weights
        self._update, self._factor = update, factor
        self._branch = branch(context.seed, *path)
        self.work = weights.work
        self._recording = recording = Recording(context, weights, update, prefix)
        self.gathered, self.late_weights = recording.gathered, recording.late_weights
        self.acted = context.phases.acted
        self._parts: dict[int, tuple[Microbatch, SubBatch]] = {}
        self._completes: dict[int, int] | None = None  # where there are several pieces
        self.doing: tuple[str, int, SubBatch] | None = None
        self._events = MicrobatchEvents(context, update)

    @classmethod
    def of_update(cls, context: TrainContext, weights: Weights, update: int) -> Self:
        """The micro-batches of an update, with its loss scale."""
        scale = context.loss_scale.value
        return cls(context, weights, path=(update,), update=update, factor=scale, prefix="train/")

    @classmethod
    def dummy(cls, context: TrainContext, microbatch: Microbatch) -> Self:
        """One micro-batch that counts nowhere, or its first piece: other ranks need its calls beside theirs."""
        first = context.cuts.pieces(context.tasks[microbatch.task], whole_of(microbatch))[0]
        one = replace(part_of(microbatch, first), index=0)
        weights = Weights.of_one(one, weight=0.0)
        step = cls(context.silently(), weights, path=("unseen",), factor=0.0)
        step.is_dummy = True
        return step

    def lay_out(self, work: tuple[Microbatch, ...]) -> tuple[int, ...]:
        tasks, cuts = self._context.tasks, self._context.cuts
        if cuts.limit is None:
            self._parts = {one.index: (one, whole_of(one)) for one in work}
        else:
            pieces = [(one, cuts.pieces(tasks[one.task], whole_of(one))) for one in work]
            if all(len(of_one) == 1 for _, of_one in pieces):
                self._parts = {one.index: (one, of_one[0]) for one, of_one in pieces}
            else:
                self._parts = dict(enumerate((one, piece) for one, of_one in pieces for piece in of_one))
            last = {one.index: number for number, (one, _) in self._parts.items()}
            self._completes = {number: index for index, number in last.items()}
        for one, piece in self._parts.values():
            self.doing = "transfer", one.index, piece  # memory may run out before anything is computed here
            break
        return tuple(self._parts)

    def settle_late(self, total: Tensor) -> None:
        self._recording.settle_late(total)

    def forward(self, stage: Stage, received: Outputs, microbatch: int) -> tuple[Outputs, Tensor | None]:
        """Apply a stage, and where it gives the task's loss, compute and record that."""
        context, (one, piece) = self._context, self._parts[microbatch]
        task = context.tasks[one.task]
        itself = self._model if self._model is not None and evaluates_itself(task) else None
        self.doing = "transfer", one.index, piece
        self._events.begin(one, piece.data, microbatch)
        batch = self._prepared(stage, one, piece)
        self.doing = "forward", one.index, piece
        if itself is None:
            given, loss = self._applied(stage, received, one, batch)
        else:
            given, loss = {}, self._evaluated(itself, stage, one, batch)
        if not stage.gives_loss:
            return given, None
        total = self._recording.take(task, one, piece, loss, method="loss" if itself is None else "evaluate")
        if itself is None:
            self._events.saw(microbatch, given, total)
        return {}, total

    def _prepared(self, stage: Stage, one: Microbatch, piece: SubBatch) -> Any:
        context, takes_batch = self._context, stage.takes_batch
        batch = piece.data if takes_batch else None
        if takes_batch and context.transfer is not None:
            batch = context.transfer(batch)
            context.phases.lap("transfer")
        context.randomness.begin(context.device, branch_of(self._branch, one.index, piece.path))
        if takes_batch:
            batch = context.tasks[one.task].transform(batch)
            if context.reorder is not None:
                batch = context.reorder(batch)
        return batch

    def _applied(self, stage: Stage, received: Outputs, one: Microbatch, batch: Any) -> tuple[Any, Any]:
        context, task, randomness = self._context, self._context.tasks[one.task], self._context.randomness
        with context.precision.forward(context.device):
            with self._events.forward(stage, one, batch) as seen:
                inputs = task.inputs(batch) if stage.takes_inputs else None
                if context.cast_inputs is not None and stage.takes_inputs:
                    inputs = context.cast_inputs(inputs)
                outputs = stage.apply(received, inputs, randomness.seed_layer)
                if not stage.gives_loss:
                    return outputs, None
                if randomness.by_layer:
                    randomness.seed_layer(LOSS)
                (output,) = outputs.values()
                if context.cast_outputs is not None:
                    output = context.cast_outputs(output)
                output = task.postprocess(output, batch)
                if seen is not None:
                    seen.append(output)
            return output, loss_of(task, output, batch)

    def _evaluated(self, model: nn.Module, stage: Stage, one: Microbatch, batch: Any) -> Any:
        context, events = self._context, self._events.forward(stage, one, batch)
        with context.precision.forward(context.device), lent(model, context) as whole, events:
            return context.tasks[one.task].evaluate(whole, batch)

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
            kept = self._context.seeds[loss.dtype] = factor, loss.new_full((), factor)
        return kept[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.randomness.in_pass = False
        self._events.end_all(error)


@contextmanager
def lent(model: nn.Module, context: TrainContext) -> Generator[nn.Module]:
    """Inside, a task may call the model, to generate with it instead of only applying it.

    It is called as an evaluation calls it: in the number formats of the run, on the device, without gradients, as it is
    written where it is compiled; autocast is the caller's. It takes part in no sum over ranks, so each rank may call it
    as often as its batches need.
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
