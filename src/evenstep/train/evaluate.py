"""Evaluates a model on one set of data: the forward half of an update.

Every batch is run forward only, in evaluation mode, through the same runner, precision and task as in training, and
its losses and metrics are summed as (sum, weight) pairs. The model's training modes are given back as they were, also
when something raises. It does not choose when.
"""

import traceback
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, cast, final

import torch
from torch import nn

from evenstep.data import Data, GlobalBatch, Position
from evenstep.errors import DataError, LostRankError, OutOfMemoryError, TaskError
from evenstep.events import Incident, Record
from evenstep.memory import give_back, is_out_of_memory
from evenstep.parallel import Spoiled
from evenstep.train.cuts import Cuts, described, half_of
from evenstep.train.execution import Execution
from evenstep.train.microbatch import MicrobatchStep
from evenstep.train.passage import Way
from evenstep.train.randomness import undisturbed
from evenstep.train.task import Task
from evenstep.train.weigh import Weights, weigh


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Generator[None]:
    """Inside, `model` is in evaluation mode, without gradients; its modes and the generators come back as they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), undisturbed(device):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@final
class Evaluation:
    """Evaluates one model on one set of data.

    Args:
        name: of the set, the prefix of its metrics: "valid" gives "valid/loss".
        data: evaluated for one epoch, whole, in its own order.
        model: what is evaluated.
        way: task, precision, device and recording.
        execution: how forwards are run, and on which ranks.
        cuts: how finely micro-batches are cut to fit into this rank's memory.
        report: told of incidents.
        guard: looks whether losses are sums, of tasks that were not trained before.
    """

    def __init__(
        self,
        *,
        name: str,
        data: Data,
        model: nn.Module,
        way: Way,
        execution: Execution,
        cuts: Cuts,
        report: Callable[[Incident], None],
        guard: Callable[[GlobalBatch], float],
    ) -> None:
        self._name = name
        self._data = data
        self._model = model
        self._way = way
        self._execution = execution
        self._cuts = cuts
        self._report = report
        self._guard = guard

    def __call__(self, update: int) -> list[Record]:
        """Evaluate the parameters after `update`. Nothing else may be pending in the storage.

        Returns:
            The metrics, "valid/loss" and so on: Σsum/Σweight over the whole set.
        """
        prefix, mark = f"{self._name}/", self._way.storage.mark()
        try:
            with evaluating(self._model, self._way.device):
                self._run(update, prefix)
        except LostRankError:
            self._way.storage.drop_after(mark)  # those that are left evaluate once more
            raise
        records = self._way.storage.settle(self._execution.group.gather)
        if not any(record.name.startswith(prefix) for record in records):
            kinds = ", ".join(f"`{type(task).__name__}.weight`" for task in self._way.tasks.values())
            raise DataError(
                f"the evaluation '{self._name}' holds nothing to evaluate: the weights of all its batches are 0; "
                f"look at its data and at {kinds}."
            )
        return records

    def _run(self, update: int, prefix: str) -> None:
        strategy, way = self._execution.strategy, self._way
        batches = self._data.batches_together(
            Position(),
            seed=way.seed,
            rank=strategy.rank,
            ranks=strategy.ranks,
            total=strategy.group.sum_floats,
        )
        with closing(cast("Any", batches)):
            for batch in batches:
                if self._model.training:
                    raise TaskError(
                        f"the evaluation '{self._name}' found the model in training mode; something has called "
                        f"`train()` on it meanwhile."
                    )
                self._guard(batch)
                weights = weigh(way.tasks, batch, strategy.group)
                for name in weights.totals:  # one task after the other, on all ranks
                    while not self._through(weights.of(name), update, batch.position.batch):
                        give_back()
                if batch.ends_epoch:
                    break

    def _through(self, weights: Weights, update: int, place: int) -> bool:
        """Take one task's part of a global batch through the model; False if it must be cut finer first."""
        way, mark, task = self._way, self._way.storage.mark(), next(iter(weights.totals))
        step = MicrobatchStep(
            way,
            weights,
            path=("evaluate", self._name, place),
            update=update,
            factor=1.0,
            prefix=f"{self._name}/",
            cuts=self._cuts,
        )
        passes = self._cuts.passes(way.tasks, weights.work)
        halve = partial(half_of, way.tasks)
        self._execution.pad_passes(passes, partial(MicrobatchStep.dummy, way), halve=halve, backward=False, kind=task)
        fault = self._try(step)
        if not self._execution.strategy.any_failed(fault is not None):
            return True
        way.storage.drop_after(mark)
        if fault:
            self._cut(step, way.tasks[task], update, fault)
        self._execution.cut_alike(self._cuts)
        return False

    def _try(self, step: MicrobatchStep) -> str | None:
        """Run the micro-batches; gives None, or the traceback of what did not fit into memory, "" if a peer's."""
        try:
            with step:
                self._execution.evaluator.run(self._execution.forwards(step.lay_out(step.work)), step)
        except Spoiled as spoiled:
            return spoiled.fault
        except (MemoryError, RuntimeError) as error:
            if not (is_out_of_memory(error) and self._execution.strategy.cuts_alone):
                raise
            return traceback.format_exc()
        return None

    def _cut(self, step: MicrobatchStep, task: Task, update: int, fault: str) -> None:
        assert step.doing is not None, "memory is taken by micro-batches"
        phase, microbatch, piece = step.doing
        what = f"rank {self._execution.strategy.rank} ran out of memory in the {phase} of {described(piece)}"
        message = f"{what} of evaluation '{self._name}'"
        if not self._cuts.finer(task, piece):
            raise OutOfMemoryError(
                f"{message}, and that can't be cut any finer. The parameters are those after update {update}; "
                f"evaluate smaller samples, or on a device with more memory."
            )
        self._report(
            Incident(
                kind="out_of_memory",
                update=update,
                message=f"{message}; it is cut in two from now on, and the batch is evaluated again.",
                details={"phase": phase, "evaluation": self._name},
                rank=self._execution.strategy.rank,
                microbatch=microbatch,
                traceback=fault,
            )
        )
