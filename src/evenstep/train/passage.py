"""One set of micro-batches on its way through the model.

For each micro-batch: move it to the device, seed its generators from (seed, path, k), apply the stage and the task's
loss in the precision's context, record loss and metrics, and hand the runner the loss. Training and evaluation take the
same way; only training comes back by `backward`, which multiplies by `factor`. A micro-batch that is too large for the
memory goes in pieces, one after the other. It does not know plans or optimizers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, cast, final

import torch
from torch import Tensor

from evenstep.data import Microbatch
from evenstep.errors import TaskError
from evenstep.events import BackwardBegin, BackwardEnd, Bus, MicrobatchBegin, MicrobatchEnd, Storage
from evenstep.keys import branch, key_below
from evenstep.pipeline import Section, Stage
from evenstep.precision import Precision
from evenstep.train.cuts import Cuts, Piece
from evenstep.train.randomness import seed_generators
from evenstep.train.task import Loss, Task
from evenstep.train.weigh import weight_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What is the same for all passages of a run."""

    task: Task
    precision: Precision
    device: torch.device
    transfer: Callable[[Any], Any]
    storage: Storage
    bus: Bus
    seed: int

    def silently(self) -> "Way":
        """The same way without anyone to hear or record it."""
        return replace(self, storage=Storage(), bus=Bus((), cast("Any", None)))


@final
class Passage:
    """One set of micro-batches on its way.

    Args:
        way: what is the same for all passages of the run.
        microbatches: those that have work.
        weights: w_m by the micro-batches' global numbers; empty where the task's weights are late.
        path: the key of the randomness, to which the micro-batch's number is added.
        update: number of the update that metrics are recorded under.
        factor: what the gradient of each summed loss is multiplied by.
        prefix: of the metrics' names.
        cuts: how finely micro-batches must be cut to fit into memory.

    Attributes:
        doing: what it does now, or did when something was raised: the phase ("transfer", "forward", "backward"), the
            micro-batch's number, and the piece.
    """

    def __init__(
        self,
        way: Way,
        microbatches: Sequence[Microbatch],
        weights: dict[int, float],
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
        self._microbatches = {microbatch.index: microbatch.data for microbatch in microbatches}
        self._weights = weights
        self._branch = branch(way.seed, *path)
        self._update = update
        self._factor = factor
        self._prefix = prefix
        self._heard = way.bus.listens("before_microbatch") or way.bus.listens("after_microbatch")
        self._open: dict[int, AbstractContextManager[None]] = {}
        self._seen: dict[int, tuple[Any, Tensor]] = {}  # output and loss of the open ones, for the end event
        self._seeds: dict[torch.dtype, Tensor] = {}
        self.late_weights: dict[int, Tensor] = {}

    @classmethod
    def unseen(cls, way: Way, batch: object) -> Self:
        """A passage of one batch, micro-batch 0, that counts nowhere: other ranks need its calls beside theirs."""
        batches = [Microbatch(index=0, data=batch, num_samples=0)]
        return cls(way.silently(), batches, {0: 0.0}, path=("unseen",), update=0, factor=0.0, prefix="", cuts=Cuts())

    def forward(self, stage: Stage, microbatch: int) -> Tensor:
        """The loss of a micro-batch, or of its last piece after the others went forward and backward."""
        whole = self._microbatches[microbatch]
        if self._cuts.limit is None:
            return self._forward(stage, microbatch, Piece(whole))
        *early, last = self._cuts.pieces(self._way.task, whole)
        for piece in early:
            loss = self._forward(stage, microbatch, piece)
            if loss.requires_grad:
                self.backward(loss, microbatch)
        return self._forward(stage, microbatch, last)

    def _forward(self, stage: Stage, microbatch: int, piece: Piece) -> Tensor:
        way = self._way
        self.doing = "transfer", microbatch, piece
        self._pieces[microbatch] = piece
        if self._heard:
            self._begin(microbatch, piece.data)
        batch = way.transfer(piece.data)
        self.doing = "forward", microbatch, piece
        seed_generators(way.device, key_below(self._branch, microbatch, *piece.path))
        with way.precision.forward(way.device):
            output = stage(way.task.inputs(batch))
            loss = way.task.loss(output, batch)
        total = self._taken(loss, output, microbatch)
        if self._heard and not torch.is_grad_enabled():
            self._end(microbatch)
        return total

    def backward(self, loss: Tensor, microbatch: int) -> None:
        self.doing = "backward", microbatch, self._pieces.pop(microbatch)
        self.descend(loss, microbatch)
        if self._heard:
            self._end(microbatch)

    def through(self, section: Section, received: Mapping[int, Any], microbatch: int) -> dict[int, Any]:
        """Apply one of several stages; each layer has randomness of its own, whatever stage it is in."""
        way = self._way
        batch = self._microbatches[microbatch]
        if self._heard and microbatch not in self._open:
            self._begin(microbatch, batch)
        with way.precision.forward(way.device):
            inputs = way.task.inputs(way.transfer(batch)) if section.takes_inputs else None
            return section(received, inputs, partial(self._seed_layer, microbatch))

    def loss(self, output: Any, microbatch: int) -> Tensor:
        """The loss of the last of several stages."""
        way = self._way
        batch = way.transfer(self._microbatches[microbatch])
        seed_generators(way.device, key_below(self._branch, microbatch, "loss"))
        with way.precision.forward(way.device):
            loss = way.task.loss(output, batch)
        return self._taken(loss, output, microbatch)

    def descend(self, loss: Tensor, microbatch: int) -> None:
        """Go back from the loss."""
        with self.going_back(microbatch):
            torch.autograd.backward((loss,), (self._seed_of(loss),))

    def going_back(self, microbatch: int) -> AbstractContextManager[None]:
        """Tell hooks of a backward."""
        update = self._update
        return self._way.bus.span(
            "backward",
            lambda: BackwardBegin(update=update, microbatch=microbatch),
            lambda error: BackwardEnd(update=update, microbatch=microbatch),
        )

    def done(self, microbatch: int) -> None:
        """This rank has nothing more to do with the micro-batch."""
        if self._heard:
            self._end(microbatch)

    def _seed_layer(self, microbatch: int, place: int) -> None:
        seed_generators(self._way.device, key_below(self._branch, microbatch, place))

    def _taken(self, loss: Loss | Tensor, output: Any, microbatch: int) -> Tensor:
        """Check and record what the task gave; the sum to go back from."""
        if not isinstance(loss, Loss):
            loss = Loss(cast("Any", loss))
        total = self._checked(loss, microbatch)
        self._record(loss, total, microbatch)
        if self._heard:
            self._seen[microbatch] = output, total.detach()
        return total

    def _seed_of(self, loss: Tensor) -> Tensor:
        """`factor` as the gradient that the backward begins with: what multiplying the loss would give, without it."""
        seed = self._seeds.get(loss.dtype)
        if seed is None:
            seed = self._seeds[loss.dtype] = loss.new_full((), self._factor)
        return seed

    def _begin(self, microbatch: int, batch: Any) -> None:
        update = self._update

        def end(error: BaseException | None) -> MicrobatchEnd:
            output, loss = self._seen.pop(microbatch, (None, None))
            return MicrobatchEnd(update=update, microbatch=microbatch, batch=batch, output=output, loss=loss)

        begin = MicrobatchBegin(update=update, microbatch=microbatch, batch=batch)
        span = self._way.bus.span("microbatch", lambda: begin, end)
        span.__enter__()
        self._open[microbatch] = span

    def _end(self, microbatch: int) -> None:
        self._open.pop(microbatch).__exit__(None, None, None)

    def _checked(self, loss: Loss, microbatch: int) -> Tensor:
        total = cast("Any", loss.sum)
        if not (
            isinstance(total, Tensor)
            and total.ndim == 0
            and total.is_floating_point()
            and (total.requires_grad or not torch.is_grad_enabled())
            and (loss.weight is not None) == self._way.task.late_weight
        ):
            raise TaskError(f"`{type(self._way.task).__name__}.loss` must give {self._fault(loss, microbatch)}")
        # A sum over many units outgrows 16 bits long before its terms do.
        return total.float() if total.dtype in (torch.float16, torch.bfloat16) else total

    def _fault(self, loss: Loss, microbatch: int) -> str:
        """What the loss must be, and is not."""
        total = cast("Any", loss.sum)
        here = f"for micro-batch {microbatch}"
        if not isinstance(total, Tensor):
            return (
                f"a 0-dim tensor, or a `Loss` of one, but gave {type(total).__name__} {here}; return the loss summed "
                f"over the batch's units."
            )
        if total.ndim or not total.is_floating_point():
            return (
                f"one floating-point number, but gave a tensor of shape {list(total.shape)} and {total.dtype} {here}; "
                f'sum it, for instance with reduction="sum".'
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            return (
                f"a loss that can be trained, but gave one that depends on no trainable parameter {here}; compute it "
                f"from the model's output, without `detach` or `no_grad`, and leave a parameter `requires_grad`."
            )
        return (
            f"a weight if, and only if, the task says `late_weight = True`, but {here} `late_weight` is "
            f"{self._way.task.late_weight} and the weight it gave is {loss.weight}."
        )

    def _record(self, loss: Loss, total: Tensor, microbatch: int) -> None:
        put = self._way.storage.put
        piece = self._pieces.get(microbatch)
        if loss.weight is not None:
            weight = torch.as_tensor(loss.weight, device=total.device).detach()
            earlier = self.late_weights.get(microbatch)
            self.late_weights[microbatch] = weight if earlier is None else earlier + weight
        elif piece is not None and piece.path:
            weight = weight_of(self._way.task, piece.data, f"a part of micro-batch {microbatch}")
        else:
            weight = self._weights[microbatch]
        put(self._prefix + "loss", total.detach(), weight, update=self._update)
        for name, (metric_sum, metric_weight) in loss.metrics.items():
            if isinstance(metric_sum, Tensor):
                metric_sum = metric_sum.detach()
            put(self._prefix + name, metric_sum, metric_weight, update=self._update)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for microbatch in list(self._open):
            self._open.pop(microbatch).__exit__(kind, error, traceback)
