"""One set of micro-batches on its way through the model.

For each micro-batch: move it to the device, seed its generators from (seed, path, k), apply its task's transforms, the
stage and the task's loss in the precision's context, record loss and metrics, and hand the runner the loss. Training
and evaluation take the same way; only training comes back by `backward`, which multiplies by the micro-batch's factor.
A micro-batch that is too large for the memory goes in pieces, one after the other. It knows no plans or optimizers.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, cast, final

import torch
from torch import Tensor
from torch.profiler import record_function

from evenstep.data import Microbatch
from evenstep.errors import TaskError
from evenstep.events import (
    BackwardBegin,
    BackwardEnd,
    Bus,
    ForwardBegin,
    ForwardEnd,
    MicrobatchBegin,
    MicrobatchEnd,
    Storage,
)
from evenstep.keys import branch
from evenstep.memory import is_out_of_memory
from evenstep.pipeline import Stage
from evenstep.precision import Precision
from evenstep.train.coefficients import Coefficients, Fixed
from evenstep.train.cuts import Cuts, Piece
from evenstep.train.descent import descend
from evenstep.train.metrics import check_names, no_pair, observations
from evenstep.train.norms import Norms
from evenstep.train.randomness import LOSS, Randomness, branch_of
from evenstep.train.task import Loss, Task
from evenstep.train.weigh import Weights, weight_of


def _as_it_is(batch: Any) -> Any:
    return batch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What is the same for all passages of a run.

    Args:
        tasks: by name; "" is that of a run with one task without a name.
        precision: the number formats.
        device: of the model.
        transfer: moves a batch there.
        storage: takes losses and metrics.
        bus: told of what happens.
        seed: of the run.
        reorder: puts a batch that is on the device, after transforms, into the model's memory format.
        coefficients: of the tasks.
        norms: whose statistics the model's normalisation layers use.
        randomness: the generators that forwards and losses draw from.
        seeds: the factors that backwards began with last, as tensors: mostly the next ones' too.
        poison: gives a loss whose gradient is not finite, in place of one that could not be computed, so that all
            ranks come to the end of the update and abort it together; None raises at once.
    """

    tasks: Mapping[str, Task]
    precision: Precision
    device: torch.device
    transfer: Callable[[Any], Any]
    storage: Storage
    bus: Bus
    seed: int
    reorder: Callable[[Any], Any] = _as_it_is
    coefficients: Coefficients = field(default_factory=Fixed)
    norms: Norms = field(default_factory=Norms)
    randomness: Randomness = field(default_factory=Randomness)
    seeds: dict[torch.dtype, tuple[float, Tensor]] = field(default_factory=dict)
    poison: Callable[[], Tensor] | None = None

    def silently(self) -> "Way":
        """The same way without anyone to hear or record it."""
        return replace(self, storage=Storage(), bus=Bus((), cast("Any", None)))


@final
@dataclass(slots=True)
class Gathered:
    """What is known of an update's micro-batches on this rank after they have run.

    Args:
        late_total: Σw_m over all ranks where the weights are late, to divide by; else None.
        losses: the summed losses with the names of their tasks, by the micro-batches' numbers.
        failures: what tasks have raised, with their names, where it is to be agreed on later.
    """

    late_total: Tensor | None = None
    losses: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    failures: dict[int, tuple[str, Exception]] = field(default_factory=dict)

    def add(self, other: "Gathered") -> None:
        """Take what is known of other micro-batches of the update."""
        self.losses.update(other.losses)
        self.failures.update(other.failures)


class Passage:
    """One set of micro-batches on its way through a model that is one stage; `StagedPassage` takes others.

    Args:
        way: what is the same for all passages of the run.
        weights: of the micro-batches that have work.
        path: the key of the randomness, to which the micro-batch's number is added.
        update: number of the update that metrics are recorded under.
        factor: what the gradient of each loss is multiplied by, beside its coefficient and after its divisor.
        prefix: of the metrics' names.
        cuts: how finely micro-batches must be cut to fit into memory.

    Attributes:
        doing: what it does now, or did when something was raised: the phase ("transfer", "forward", "backward"), the
            micro-batch's number, and the piece.
    """

    def __init__(
        self,
        way: Way,
        weights: Weights,
        *,
        path: tuple[int | str, ...],
        update: int,
        factor: float,
        prefix: str,
        cuts: Cuts,
    ) -> None:
        self._way = way
        self._cuts = cuts
        self._pieces: dict[int, Piece] = {}  # the last one of each micro-batch that waits for its backward
        self.doing: tuple[str, int, Piece] | None = None
        self._weights = weights
        self._microbatches = {microbatch.index: microbatch for microbatch in weights.work}
        self._branch = branch(way.seed, *path)
        self._update = update
        self._factor = factor
        self._prefix = prefix
        self._heard = way.bus.listens("before_microbatch") or way.bus.listens("after_microbatch")
        self._profiled = bool(cast("Any", torch.autograd)._profiler_enabled())
        heard = way.bus.listens("before_forward") or way.bus.listens("after_forward")
        self._apply = self._observed if heard or self._profiled or way.norms.by_task else self._plain
        self._open: dict[int, AbstractContextManager[None]] = {}
        self._seen: dict[int, tuple[Any, Tensor | None]] = {}  # output and loss of the open ones, for the end event
        self.late_weights: dict[int, Tensor] = {}
        self.gathered = Gathered()

    @classmethod
    def unseen(cls, way: Way, microbatch: Microbatch) -> Self:
        """A passage of one micro-batch that counts nowhere: other ranks need its calls beside theirs."""
        one = replace(microbatch, index=0)
        weights = Weights.of_one(one, weight=0.0)
        return cls(way.silently(), weights, path=("unseen",), update=0, factor=0.0, prefix="", cuts=Cuts())

    def forward(self, stage: Stage, microbatch: int) -> Tensor | None:
        """The loss of a micro-batch, or of its last piece after the others went forward and backward."""
        one = self._microbatches[microbatch]
        if self._cuts.limit is None:
            return self._forward(stage, one, Piece(one.data, (), one.known_samples))
        *early, last = self._cuts.pieces(self._way.tasks[one.task], one.data, one.known_samples)
        for piece in early:
            loss = self._forward(stage, one, piece)
            if torch.is_grad_enabled():
                self.backward(loss, microbatch)
        return self._forward(stage, one, last)

    def _forward(self, stage: Stage, one: Microbatch, piece: Piece) -> Tensor | None:
        way, microbatch = self._way, one.index
        self.doing = "transfer", microbatch, piece
        self._pieces[microbatch] = piece
        if self._heard:
            self._begin(one, piece.data, microbatch)
        try:
            output, total = self._computed(stage, one, piece)
        except Exception as error:
            if way.poison is None or not torch.is_grad_enabled() or is_out_of_memory(error):
                raise
            self.gathered.failures[microbatch] = one.task, error
            if self._heard:
                self._open.pop(microbatch).__exit__(type(error), error, error.__traceback__)
            return way.poison()
        if self._heard:
            self._seen[microbatch] = output, None if total is None else total.detach()
            if not torch.is_grad_enabled():
                self._end(microbatch)
        return total

    def _computed(self, stage: Stage, one: Microbatch, piece: Piece) -> tuple[Any, Tensor | None]:
        way = self._way
        if one.index in self._weights.failures:
            raise self._weights.failures[one.index]
        task, batch = way.tasks[one.task], self._ready(one, piece)
        self.doing = "forward", one.index, piece
        with way.precision.forward(way.device):
            output = self._apply(stage, task, one, batch)
            loss = task.loss(output, batch)
        return output, self._taken(task, one, loss)

    def _ready(self, one: Microbatch, piece: Piece) -> Any:
        """The piece on the device, with its task's transforms; the generators are then the forward's."""
        way = self._way
        batch = way.transfer(piece.data)
        way.randomness.begin(way.device, branch_of(self._branch, one.index, piece.path))
        return way.reorder(way.tasks[one.task].transform(batch))

    def _taken(self, task: Task, one: Microbatch, loss: Loss | Tensor | None) -> Tensor | None:
        """Check and record what the task gave; the sum to go back from."""
        if loss is None and not one.task:  # with one task, more likely a forgotten `return` than a batch without a loss
            raise TaskError(
                f"`{type(task).__name__}.loss` must give a 0-dim tensor, or a `Loss` of one, but gave None for "
                f"micro-batch {one.index}; return the loss summed over the batch's units, or `Loss(None)` for a batch "
                f"that has none."
            )
        if not isinstance(loss, Loss):
            loss = Loss(loss)
        elif task.late_weight and loss.weight is None and loss.count is not None:
            loss = replace(loss, weight=loss.count)
        return self._record(one, loss, self._checked(task, loss, one.index))

    def _plain(self, stage: Stage, task: Task, one: Microbatch, batch: Any) -> Any:
        output = stage(task.inputs(batch))
        if self._way.randomness.by_layer:
            self._way.randomness.place(LOSS)
        return task.postprocess(output, batch)

    def _observed(self, stage: Stage, task: Task, one: Microbatch, batch: Any) -> Any:
        """The same, with what hooks, a profiler and layers with statistics of each task need around it."""
        update, output = self._update, None
        span = self._way.bus.span(
            "forward",
            lambda: ForwardBegin(update=update, microbatch=one.index, batch=batch, task=one.task),
            lambda error: ForwardEnd(update=update, microbatch=one.index, output=output, task=one.task),
        )
        with span, self._way.norms.of(one.task), self._range("forward", one.task):
            output = self._plain(stage, task, one, batch)
        return output

    def backward(self, loss: Tensor | None, microbatch: int) -> None:
        self.doing = "backward", microbatch, self._pieces.pop(microbatch)
        if loss is not None:
            self._descend(loss, self._microbatches[microbatch])
        if self._heard and microbatch in self._open:
            self._end(microbatch)

    def _descend(self, loss: Tensor, one: Microbatch) -> None:
        """Go back from the loss."""
        with self._going_back(one), self._range("backward", one.task):
            descend(loss, self._seed_of(loss, one))

    def _going_back(self, one: Microbatch) -> AbstractContextManager[None]:
        """Tell hooks of a backward."""
        update, microbatch, task = self._update, one.index, one.task
        return self._way.bus.span(
            "backward",
            lambda: BackwardBegin(update=update, microbatch=microbatch, task=task),
            lambda error: BackwardEnd(update=update, microbatch=microbatch, task=task),
        )

    def _range(self, phase: str, task: str) -> AbstractContextManager[Any]:
        """A range of the profiler's, if one is watching."""
        return record_function(f"{phase}/{task}" if task else phase) if self._profiled else _NOTHING

    def _seed_of(self, loss: Tensor, one: Microbatch) -> Tensor:
        """The factor as the gradient that a backward begins with: what multiplying the loss would give, without it."""
        factor = self._factor * self._way.coefficients.value(one.task, self._update) / self._weights.divisors[one.index]
        kept = self._way.seeds.get(loss.dtype)
        if kept is None or kept[0] != factor:
            kept = self._way.seeds[loss.dtype] = factor, loss.new_full((), factor)
        return kept[1]

    def _begin(self, one: Microbatch, batch: Any, number: int) -> None:
        """Tell hooks of a micro-batch, which is `number` in the plan."""
        update, microbatch = self._update, one.index

        def end(error: BaseException | None) -> MicrobatchEnd:
            output, loss = self._seen.pop(number, (None, None))
            return MicrobatchEnd(
                update=update, microbatch=microbatch, batch=batch, output=output, loss=loss, task=one.task
            )

        begin = MicrobatchBegin(update=update, microbatch=microbatch, batch=batch, task=one.task)
        span = self._way.bus.span("microbatch", lambda: begin, end)
        span.__enter__()
        self._open[number] = span

    def _end(self, number: int) -> None:
        self._open.pop(number).__exit__(None, None, None)

    def _checked(self, task: Task, loss: Loss, microbatch: int) -> Tensor | None:
        total = cast("Any", loss.sum)
        if total is None or (isinstance(total, Tensor) and total.numel() == 0):
            if loss.weight is not None or not task.late_weight:
                return None
        elif (
            isinstance(total, Tensor)
            and total.ndim == 0
            and total.is_floating_point()
            and (total.requires_grad or not torch.is_grad_enabled())
            and (loss.weight is not None) == task.late_weight
        ):
            # A sum over many units outgrows 16 bits long before its terms do.
            return total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        raise TaskError(f"`{type(task).__name__}.loss` must give {_fault(task, loss, microbatch)}")

    def _record(self, one: Microbatch, loss: Loss, total: Tensor | None) -> Tensor | None:
        """Record loss and metrics; gives the loss that is trained on, which has its learned coefficient."""
        put, update = self._way.storage.put, self._update
        prefix = f"{self._prefix}{one.task}/" if one.task else self._prefix
        weight = self._weight_of(one, loss)
        task = self._way.tasks[one.task]
        if loss.metrics:
            check_names(task, loss)
        for name, pair in loss.metrics.items():
            try:
                metric_sum, metric_weight = pair
            except (TypeError, ValueError) as error:
                raise no_pair(task, name, pair) from error
            if isinstance(metric_sum, Tensor):
                metric_sum = metric_sum.detach()
            put(prefix + name, metric_sum, metric_weight, update=update)
        if task.metrics:
            for name, seen in observations(task, loss, one.index):
                key = f"{one.task}/{name}" if one.task else name
                self._way.storage.observe(self._prefix, key, seen, update=update)
        if total is None:
            put(prefix + "loss", 0.0, weight, update=update)
            put(prefix + "no_loss", 1.0, update=update)
            return None
        detached = total.detach()
        put(prefix + "loss", detached, weight, update=update)
        earlier = self.gathered.losses.get(one.index)  # of another piece
        self.gathered.losses[one.index] = one.task, detached if earlier is None else earlier[1] + detached
        return self._trained(one, total, weight) if one.task and torch.is_grad_enabled() else total

    def _weight_of(self, one: Microbatch, loss: Loss) -> float | Tensor:
        """What a micro-batch, or the piece of it that is under way, weighs."""
        piece = self._pieces.get(one.index)
        if loss.weight is not None:
            weight = torch.as_tensor(loss.weight, device=self._way.device).detach()
            earlier = self.late_weights.get(one.index)
            self.late_weights[one.index] = weight if earlier is None else earlier + weight
            return weight
        if piece is not None and piece.path:
            what = f"a part of micro-batch {one.index}"
            return weight_of(self._way.tasks[one.task], piece.data, what, piece.num_samples)
        return self._weights.each[one.index]

    def _trained(self, one: Microbatch, total: Tensor, weight: float | Tensor) -> Tensor:
        """The loss with its learned coefficient; `train/loss` is then what all tasks' losses come to together."""
        way, weights = self._way, self._weights
        divisor, late = weights.divisors[one.index], isinstance(weight, Tensor)
        share = weight if isinstance(weight, Tensor) else divisor * weight / weights.totals[one.task]
        trained = way.coefficients.weighted(one.task, total, share)
        if not late:
            scaled = trained.detach() * (way.coefficients.value(one.task, self._update) / divisor)
            part = cast("float", weight) / weights.totals[one.task] / weights.num_tasks
            way.storage.put(f"{self._prefix}loss", scaled, part, update=self._update)
        return trained

    def __enter__(self) -> Self:
        self._way.randomness.begin_passage(torch.is_grad_enabled(), *self._weights.totals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._way.randomness.end_passage()
        for microbatch in list(self._open):
            self._open.pop(microbatch).__exit__(kind, error, traceback)


_NOTHING = nullcontext()


def _fault(task: Task, loss: Loss, microbatch: int) -> str:
    """What the loss must be, and is not."""
    total = cast("Any", loss.sum)
    here = f"for micro-batch {microbatch}"
    weight = (
        f"a weight if, and only if, the task says `late_weight = True`, but {here} `late_weight` is "
        f"{task.late_weight} and the weight it gave is {loss.weight}."
    )
    if total is None:
        return weight
    if not isinstance(total, Tensor):
        return (
            f"a 0-dim tensor, or a `Loss` of one, but gave {type(total).__name__} {here}; return the loss summed "
            f"over the batch's units{_instead_of(total)}."
        )
    if total.ndim or not total.is_floating_point():
        return (
            f"one floating-point number, but gave a tensor of shape {list(total.shape)} and {total.dtype} {here}; "
            f'sum it, for instance with reduction="sum", or `.sum()` of one loss per sample.'
        )
    if torch.is_grad_enabled() and not total.requires_grad:
        return (
            f"a loss that can be trained, but gave one that depends on no trainable parameter {here}; compute it "
            f"from the model's output, without `detach` or `no_grad`, and leave a parameter `requires_grad`."
        )
    return weight


def _instead_of(given: object) -> str:
    """What to return for what people are used to return elsewhere."""
    if isinstance(given, Mapping) and "loss" in given:
        return (
            ": the entry 'loss' by itself, and what is to be logged as `Loss(sum, metrics={name: (sum, weight)})`; "
            "where it is a mean, as that of models of `transformers`, `Loss.of_mean(mean, count)`"
        )
    if isinstance(given, tuple | list):
        return ": the loss by itself, and what else is to be logged as `Loss(sum, metrics={name: (sum, weight)})`"
    if isinstance(given, float | int):
        return ", as the tensor that it is before `.item()`: a number has no gradient"
    return ""
