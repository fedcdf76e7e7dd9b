"""One update: weigh → plan → run → judge → apply.

Everything that depends on how the run is set up is an object that was chosen when it was built: the strategy, the
precision, the way of applying. The update asks nothing about modes. It does not count, log, save or decide what to do
about an abort; that is the loop's.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from evenstep.data import GlobalBatch
from evenstep.optim.apply import Apply, gradients
from evenstep.optim.ema import Ema
from evenstep.optim.learning_rate import LearningRates
from evenstep.train.buffers import Buffers
from evenstep.train.execution import Execution
from evenstep.train.passage import Passage, Way
from evenstep.train.weigh import Weights, weigh


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one update.

    Args:
        aborted: 0.0 when it was applied, 1.0 when not; a tensor while only the device knows.
        total: Σw of the update; a tensor where the weight is late.
    """

    aborted: float | Tensor
    total: float | Tensor


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
    ) -> None:
        self._parameters = parameters
        self._with_grad = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        self._way = way
        self._execution = execution
        self._apply = apply
        self._ema = ema
        self._learning_rates = learning_rates
        self._buffers = Buffers(model)
        self.is_whole = True

    def __call__(self, batch: GlobalBatch, update: int) -> Outcome:
        """Execute update number `update` with `batch`.

        With S the loss scale and all sums over micro-batches and ranks, the parameters' gradients become
        S·Σ∇S_m / Σw_m, or S·Σ∇S_m where the weight is late; what is left of S / Σw_m goes into the divisor of
        `Apply`.
        """
        self.begin()
        weights = weigh(self._way.task, batch, self._execution.strategy.group)
        if weights.total == 0:
            return Outcome(aborted=1.0, total=0.0)
        late_weight = self._accumulate(weights, update)
        total = weights.total if late_weight is None else late_weight
        scale = self._way.precision.scale
        lr = self._learning_rates(update)
        grads = gradients(self._parameters, sparse=self._sparse)
        squared = self._execution.squared_norm(grads)
        self.is_whole = False  # until all that follows has been applied
        applied = self._apply(grads, squared, scale if late_weight is None else scale * total)
        self._execution.strategy.after_step()
        self._buffers.restore(applied.aborted)
        if self._ema is not None and applied.aborted != 1.0:
            self._ema.after_update(update, applied.aborted)
        self.is_whole = True
        put = self._way.storage.put
        put("train/grad_norm", applied.norm, update=update)
        put("train/lr", lr, update=update)
        return Outcome(aborted=applied.aborted, total=total)

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
        self._accumulate(weigh(self._way.task, batch, self._execution.strategy.group), update)
        self._buffers.restore(1.0)

    def resume(self) -> None:
        """Apply updates again after the loop has answered an abort."""
        self._apply.resume()

    def _accumulate(self, weights: Weights, update: int) -> Tensor | None:
        """Leave the update's gradients in `.grad`; gives Σw_m where the weight is late."""
        for parameter in self._with_grad:
            parameter.grad = None
        passage = Passage(
            self._way,
            weights.work,
            weights.each,
            path=(update,),
            update=update,
            factor=self._way.precision.scale / weights.total,
            prefix="train/",
        )
        self._execution.match([microbatch.data for microbatch in weights.work], self._unseen, backward=True)
        with passage:
            work = tuple(microbatch.index for microbatch in weights.work)
            self._execution.train(work, passage, weights.num_microbatches)
        return self._late_total(passage.late_weights, weights) if self._way.task.late_weight else None

    @contextmanager
    def _unseen(self, batch: object) -> Generator[Passage]:
        """The passage of a batch that counts nowhere, after which buffers are as before."""
        with Passage.unseen(self._way, batch) as passage:
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
