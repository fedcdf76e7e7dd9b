"""Updates that are one compiled graph each.

The first step of a parameter, an update without work, and every repeated one are left to `Update`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.contrib.compiled_update.compilations import CAPTURED, INDUCTOR, Compiled, NotCompiledError, keep_address
from evenstep.contrib.compiled_update.formulas import OptimizerState
from evenstep.contrib.compiled_update.graphs import FIXED, Held, Step, Told, function_of
from evenstep.data import GlobalBatch, Microbatch
from evenstep.data.seeding import undisturbed
from evenstep.errors import ArgumentError
from evenstep.internals import buffers_of, has_gradient_hooks, has_step_hooks, parameters_of, places_of, pytree
from evenstep.keys import branch, branch_below
from evenstep.oom import is_out_of_memory
from evenstep.parallel.buffers import running_statistics
from evenstep.train.build import Parts
from evenstep.train.progress import Progress
from evenstep.train.randomness import branch_of
from evenstep.train.tasks.task import Loss, Task
from evenstep.train.update.microbatch import MicrobatchStep
from evenstep.train.update.outcome import PendingUpdate
from evenstep.train.update.recording import Recording
from evenstep.train.update.weigh import Weights

_GRAPH = crc32(b"graph") | 1 << 40  # the key of the name "graph", without encoding it each time


class _Probed(NamedTuple):
    """Numbers of the parameters that get a gradient, and of the model's buffers that forwards move."""

    used: tuple[int, ...]
    moving: tuple[int, ...]


@final
@dataclass(slots=True)
class _Entry:
    """A graph, with its tensors, rows of numbers and step."""

    probed: _Probed
    held: Held | None = None
    version: int = -1
    rows: tuple[int, ...] = ()
    step: Step | None = None
    compiled: Compiled | None = None


class _Outcome(NamedTuple):
    """Result of an update of the parameters `own`: ‖g‖₂ before clipping, 1 for an abort, outputs of micro-batches."""

    norm: Tensor
    aborted: Tensor
    told: Sequence[Told]
    own: tuple[int, ...]


@final
class CompiledUpdate:
    """Executes updates as graphs, with the verdicts, records and counters of `Update`.

    Attributes:
        reads_at_once: True if the host knows at once that an update was applied.
    """

    def __init__(self, parts: Parts) -> None:
        context = parts.context
        self._core = parts.core
        self._model = parts.model
        self._optimizer = parts.optimizer
        self._context = context
        self._execution = parts.execution
        self._ema = parts.train.ema
        self._clip_norm = parts.train.clip_norm
        self._state = OptimizerState(parts.optimizer)
        self.reads_at_once = context.device.type == "cpu"  # where reading the verdict costs nothing
        self.backend = CAPTURED if context.device.type == "cuda" else INDUCTOR
        names = places_of(parts.model, parameters_of)
        self._names = [names[id(one)] for one in self._state.parameters]
        self._buffers = list(parts.model.buffers())
        names = places_of(parts.model, buffers_of)
        self._names_of_buffers = [names[id(one)] for one in self._buffers]
        wide = any(one.dtype == torch.float64 for one in self._state.parameters)
        self._format = torch.float64 if wide else torch.float32
        self._entries: dict[Hashable, dict[_Probed, _Entry]] = {}  # by shapes, tasks and trained parameters
        self._transforms = {name for name, task in context.tasks.items() if type(task).transform is not Task.transform}
        self._root = branch(context.seed)
        self._halted: Tensor | None = None
        self._dispatched = 0

    def __call__(self, batch: GlobalBatch, before: Progress) -> PendingUpdate:
        """Execute the update that follows `before` with `batch`; see `Update`."""
        core, context, update = self._core, self._context, before.update + 1
        core.rollback.begin(update, batch)
        core.trained.follow()
        weights = core.weigh(batch)
        if not weights.totals or not self._model.training:
            return core(batch, before)
        self._follow_state(update)
        undo = core.rollback.begin_passes()
        pending = PendingUpdate(
            batch=batch,
            before=before,
            loss_scale=context.loss_scale.state_dict(),
            rates=core.learning_rates.last,
            total=weights.total,
            skipped_samples=weights.skipped_samples,
        )
        rates = core.learning_rates(update, batch.position.epoch)
        core.is_whole = False  # until all that follows has been applied
        try:
            outcome = self._computed(weights, update)
        except Exception as error:
            core.is_whole = not is_out_of_memory(error)  # all else is raised before anything is changed
            core.learning_rates.restore(pending.rates)
            raise
        core.is_whole = True
        if outcome is None:
            undo()
            core.learning_rates.restore(pending.rates)
            if self._halted is not None:
                core.resume(self._halted)
            pending = core(batch, before)
            self._state.read()
            self._dispatched = update
            self._halted = pending.aborted if isinstance(pending.aborted, Tensor) else None
            return pending
        self._dispatched = update
        pending.norm, pending.aborted = self._verdict(outcome)
        core.rollback.judge(pending.aborted)
        pending.losses = self._record(weights, update, outcome).losses
        core.record(pending, rates)
        context.phases.lap("compiled")
        return pending

    def _follow_state(self, update: int) -> None:
        check_uncalled(self._optimizer, self._state.parameters)
        if update <= self._dispatched:  # later updates were taken back, or another state was loaded
            self._state.read()
            self._halted = None
        self._state.follow()

    def _computed(self, weights: Weights, update: int) -> _Outcome | None:
        """Compute and apply an update by graphs.

        Nothing is computed, and None given, if no parameter gets a gradient, or one that was never stepped does.
        """
        context = self._context
        scale, value = context.loss_scale.value, context.coefficients.value
        own = branch_below(self._root, update)
        try:
            batches = [self._prepared(one, own) for one in weights.work]
            forms = [(one.task, _form_of(batch)) for one, batch in zip(weights.work, batches, strict=True)]
            share = 0.0 if self._ema is None else self._ema.share(update)
            factors = [scale * value(one.task, update) / weights.divisors[one.task] for one in weights.work]
            tasks = tuple([context.tasks[one.task] for one in weights.work])
            self._begin_graph(weights, update)
            entries = self._entries.setdefault((self._core.trained.stamp, *forms), {})
            with torch.no_grad():
                for entry in entries.values():
                    try:
                        return self._run(entry, tasks, batches, [scale, share], factors)
                    except NotCompiledError:
                        pass
                probed = self._probe(weights, update)
                entry = entries.setdefault(probed, _Entry(probed))
                return self._run(entry, tasks, batches, [scale, share], factors, compiles=True)
        finally:
            context.randomness.in_pass = False

    def _run(
        self,
        entry: _Entry,
        tasks: tuple[Task, ...],
        batches: list[Any],
        shares: list[float],
        factors: list[float],
        *,
        compiles: bool = False,
    ) -> _Outcome | None:
        state, own = self._state, entry.probed.used
        if not own or state.lacks(own):
            return None
        if entry.version != state.version:
            self._refresh(entry, tasks)
        rows = [number for row in entry.rows for number in state.numbers(row)]
        device = self._context.device
        packed = torch.tensor([*shares, *rows, *factors], dtype=self._format)
        packed = (packed.pin_memory() if device.type == "cuda" else packed).to(device, non_blocking=True)
        assert entry.compiled is not None
        run = entry.compiled if compiles else entry.compiled.known
        norm, aborted, told = run(entry.held, batches, packed, self._halted)
        return _Outcome(norm, aborted, told, own)

    def _refresh(self, entry: _Entry, tasks: tuple[Task, ...]) -> None:
        state, (own, moving) = self._state, entry.probed
        formulas, (rows, entry.rows) = state.formulas(own), state.rows(own)
        starts = [2]
        for first in entry.rows:
            starts.append(starts[-1] + formulas[own.index(first)].width)
        step = Step(formulas, tuple([starts[row] for row in rows]), self._clip_norm)
        average = self._core.average
        entry.held = held = Held(
            parameters=[state.parameters[one] for one in own],
            kept=state.tensors(own),
            counts=state.counts(own),
            buffers=[self._buffers[one] for one in moving],
            averaged=[] if average is None else average.followed,
        )
        if self.backend.captures:
            keep_address([*held.parameters, *held.buffers, *held.counts])
            keep_address([one for several in (*held.kept, *held.averaged) for one in several])
        entry.version = state.version
        if entry.step != step:
            entry.step = step
            trained = [self._names[one] for one in own]
            names_of_buffers = [self._names_of_buffers[one] for one in moving]
            function = function_of(self._model, self._context, tasks, trained, names_of_buffers, step)
            entry.compiled = Compiled(function, FIXED, self.backend)

    def _begin_graph(self, weights: Weights, update: int) -> None:
        own = branch_below(self._root, update)
        self._context.randomness.begin(branch_below(own, weights.work[0].index, _GRAPH))

    def _prepared(self, one: Microbatch, own: int) -> Any:
        context, batch = self._context, one.data
        if context.transfer is not None:
            batch = context.transfer(batch)
        if one.task in self._transforms:
            context.randomness.begin(branch_of(own, one.index, ()))
            batch = context.tasks[one.task].transform(batch)
        return batch

    def _verdict(self, outcome: _Outcome) -> tuple[float | Tensor, float | Tensor]:
        norm, aborted = outcome.norm, outcome.aborted
        if self.backend.captures:  # the graph's next run writes to its outputs
            norm, aborted = norm.clone(), aborted.clone()
        if not self.reads_at_once:
            self._halted = aborted
            self._state.committed(outcome.own)
            return norm, aborted
        if aborted.item():
            return norm.item(), 1.0
        self._state.committed(outcome.own)
        return norm.item(), 0.0

    def _record(self, weights: Weights, update: int, outcome: _Outcome) -> Recording:
        context, recording = self._context, Recording(self._context, weights, update, "train/")
        for one, told in zip(weights.work, outcome.told, strict=True):
            task = context.tasks[one.task]
            if self.backend.captures:
                told = pytree.tree_map_only(Tensor, Tensor.clone, told)
            total, metrics, observed, counts = told
            if total is None or metrics or observed is not None or counts or task.metrics:
                with torch.no_grad():
                    recording.take(task, one, Loss(total, metrics=metrics, observed=observed, counts=counts))
            else:
                recording.record_loss(one, total, weights.each[one.index])
            if one.task:
                recording.add_to_all(one, 0.0 if total is None else total, weights.each[one.index])
        return recording

    def _probe(self, weights: Weights, update: int) -> _Probed:
        """Run the update's micro-batches once without compiling, forward and backward, and take everything back.

        Errors of a task are raised here, with the messages of a run without compiling.
        """
        core, silent = self._core, self._context.silently()
        self._drop_gradients()  # of an update that was not compiled
        work = [replace(one, data=pytree.tree_map_only(Tensor, Tensor.clone, one.data)) for one in weights.work]
        recording = Recording(silent, weights, update, "train/")
        factors = dict.fromkeys(weights.totals, 1.0)
        step = MicrobatchStep(silent, tuple(work), recording.take, path=(update,), update=update, factors=factors)
        buffers = core.rollback.buffers
        with core.rollback.unchanged(), undisturbed(), torch.enable_grad(), step:
            self._execution.run_locally(step)
            core.rollback.check_writes()
            buffers.settle()
            kept = {id(one) for one in running_statistics(self._model)}  # moved without a sign
            every = enumerate(self._model.buffers())
            moving = tuple([number for number, one in every if id(one) in kept or buffers.moved(one)])
        refuse("the task's loss has `shown`", bool(silent.storage.take_shown()))
        used = tuple([number for number, one in enumerate(self._state.parameters) if one.grad is not None])
        self._drop_gradients()
        self._begin_graph(weights, update)
        return _Probed(used, moving)

    def _drop_gradients(self) -> None:
        for one in self._core.trained.with_grad:
            one.grad = None


def _form_of(data: Any) -> Hashable:
    """Shapes and formats of the tensors in tuples, lists and dicts."""
    if isinstance(data, Tensor):
        return data.shape, data.dtype
    held: Any = data
    if isinstance(data, tuple | list):
        return tuple(map(_form_of, held))
    if isinstance(data, dict):
        return tuple([(name, _form_of(one)) for name, one in held.items()])
    return type(data)


def check_uncalled(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ArgumentError for hooks on the step or on gradients, which the graph would not call."""
    refuse("the optimizer's step has hooks, or was replaced, as by torch's LR schedulers", has_step_hooks(optimizer))
    refuse("a parameter has hooks on its gradient", any(map(has_gradient_hooks, parameters)))


def refuse(reason: str, applies: bool) -> None:
    if applies:
        raise ArgumentError(f"`compile` is 'update', but {reason}; set `compile` to 'model'.", field="compile")
