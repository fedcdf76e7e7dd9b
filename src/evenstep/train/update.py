"""One update: weigh → plan → run → judge → apply.

Everything that depends on how the run is set up is an object that was chosen when it was built: the strategy, the
precision, the way of applying. The update asks nothing about modes. It does not count, log, save or decide what to do
about an abort; that is the loop's.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from evenstep.data import GlobalBatch, Microbatch
from evenstep.errors import TaskError
from evenstep.events import StepBegin, StepEnd
from evenstep.optim.apply import Apply, gradients
from evenstep.optim.ema import Ema
from evenstep.optim.learning_rate import LearningRates
from evenstep.train.blame import Blamed, blame
from evenstep.train.buffers import Buffers
from evenstep.train.combine import Combine
from evenstep.train.execution import Execution
from evenstep.train.passage import Gathered, Passage, Way
from evenstep.train.separately import Separately
from evenstep.train.weigh import Weights, weigh


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one update.

    Args:
        aborted: 0.0 when it was applied, 1.0 when not; a tensor while only the device knows.
        total: Σw of the update; a tensor where the weight is late.
        gathered: of this rank's micro-batches.
    """

    aborted: float | Tensor
    total: float | Tensor
    gathered: Gathered = field(default_factory=Gathered)


@final
class Update:
    """Executes updates of one model.

    Args:
        model: what is trained.
        parameters: those of the model that are clipped and stepped together, on whichever rank.
        way: task, precision, device and recording; see `Passage`.
        execution: how forwards and backwards are run, and gradients shared.
        apply: how a gradient is applied.
        ema: the average that follows the parameters, or None.
        learning_rates: sets the optimizer's for each update.
        combine: what is made of the tasks' separate gradients; None accumulates them into one.

    Attributes:
        is_whole: False if an error came while parameters were changed, so that they are those of no update.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        way: Way,
        execution: Execution,
        apply: Apply,
        ema: Ema | None,
        learning_rates: LearningRates,
        combine: Combine | None = None,
    ) -> None:
        self._parameters = parameters
        self._with_grad = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        self._model = model
        self._way = way
        self._execution = execution
        self._apply = apply
        self._ema = ema
        self._learning_rates = learning_rates
        self._buffers = Buffers(model)
        self.is_whole = True
        self._gather: Callable[[Weights, int], Gathered] = self._accumulate
        if combine is not None:
            trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
            self._gather = Separately(
                accumulate=self._accumulate, combine=combine, parameters=trained, way=way, group=execution.group
            )

    def __call__(self, batch: GlobalBatch, update: int) -> Outcome:
        """Execute update number `update` with `batch`.

        With S the loss scale and all sums over micro-batches and ranks, the parameters' gradients become
        S·Σ_t λ_t·Σ∇S_m / Σw_m, or S·Σ∇S_m where the weight is late; what is left of S / Σw_m goes into the divisor of
        `Apply`.
        """
        self.begin()
        if not self._model.training:
            raise TaskError(
                f"update {update} trains a model that is in evaluation mode; something has called `eval()` on it and "
                f"not `train()` afterwards. Freeze single layers by calling `eval()` on those."
            )
        weights = self._weigh(batch)
        if weights.total == 0:
            return Outcome(aborted=1.0, total=0.0)
        gathered = self._gather(weights, update)
        late_weight = gathered.late_total
        total = weights.total if late_weight is None else late_weight
        scale = self._way.precision.scale
        lr = self._learning_rates(update)
        grads = gradients(self._parameters, sparse=self._sparse)
        if not grads and self._execution.stages is None:  # on no rank: no task gave a loss
            self._buffers.restore(1.0)
            return Outcome(aborted=1.0, total=0.0)
        squared = self._execution.squared_norm(grads)
        self.is_whole = False  # until all that follows has been applied
        with self._way.bus.span("step", lambda: StepBegin(update=update), lambda error: StepEnd(update=update)):
            applied = self._apply(grads, squared, scale if late_weight is None else scale * total)
            self._execution.strategy.after_step()
        self._buffers.restore(applied.aborted)
        if self._ema is not None and applied.aborted != 1.0:
            self._ema.after_update(update, applied.aborted)
        self.is_whole = True
        put = self._way.storage.put
        put("train/grad_norm", applied.norm, update=update)
        put("train/lr", lr, update=update)
        return Outcome(aborted=applied.aborted, total=total, gathered=gathered)

    def begin(self) -> None:
        """Take the buffers as they are: whatever the user did to them since the last update stays."""
        self._buffers.restore(0.0)

    def abandon(self) -> None:
        """Undo what an update that has raised in the middle did to the buffers, and be ready for another."""
        self._buffers.restore(1.0)
        self._execution.strategy.abandon()
        self.resume()

    def rerun(self, batch: GlobalBatch, update: int) -> None:
        """Compute the gradients of an aborted update once more, to look at them; nothing is applied."""
        self._gather(self._weigh(batch), update)
        self._buffers.restore(1.0)

    def blame(self, batch: GlobalBatch, gathered: Gathered, update: int) -> list[Blamed]:
        """Whose fault it is that an update's gradient is not finite: all ranks ask together, and get the same.

        Where every loss is finite, each task's gradient is computed once more by itself.
        """
        blamed = blame(gathered, self._execution.group)
        if blamed or len(self._way.tasks) == 1:
            return blamed
        weights = self._weigh(batch)
        for name in weights.totals:
            self._accumulate(weights.of(name), update)
            self._buffers.restore(1.0)
            squared = self._execution.squared_norm(gradients(self._parameters, sparse=self._sparse))
            if not bool(squared.isfinite()):
                blamed.append(Blamed(microbatch=-1, task=name, why="its gradient is not finite, though its losses are"))
        return blamed

    def _weigh(self, batch: GlobalBatch) -> Weights:
        way = self._way
        return weigh(way.tasks, batch, self._execution.strategy.group, tolerant=way.poison is not None)

    def resume(self) -> None:
        """Apply updates again after the loop has answered an abort."""
        self._apply.resume()

    def _accumulate(self, weights: Weights, update: int) -> Gathered:
        """Leave the gradients of the micro-batches in `.grad`, summed over all ranks."""
        for parameter in self._with_grad:
            parameter.grad = None
        passage = Passage(
            self._way, weights, path=(update,), update=update, factor=self._way.precision.scale, prefix="train/"
        )
        self._execution.match(weights.work, self._unseen, backward=True, kind=next(iter(weights.totals)))
        with passage:
            work = tuple(microbatch.index for microbatch in weights.work)
            self._execution.train(work, passage, weights.num_microbatches)
        gathered = passage.gathered
        if all(self._way.tasks[name].late_weight for name in weights.totals):
            gathered.late_total = self._late_total(passage.late_weights, weights)
        return gathered

    @contextmanager
    def _unseen(self, microbatch: Microbatch) -> Generator[Passage]:
        """The passage of a micro-batch that counts nowhere, after which buffers are as before."""
        with Passage.unseen(self._way, microbatch) as passage:
            yield passage
        self._buffers.restore(1.0)

    def _late_total(self, late: dict[int, Tensor], weights: Weights) -> Tensor:
        """Σw_m over all ranks, in the order of the micro-batches' numbers whoever ran them."""
        dtype = torch.float32 if self._way.device.type == "mps" else torch.float64  # mps has no float64
        each = torch.zeros(weights.num_microbatches, dtype=dtype, device=self._way.device)
        for microbatch, weight in late.items():
            each[microbatch] = weight
        self._execution.group.sum(each)()
        return each.sum()
