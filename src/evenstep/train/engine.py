"""The engine: updates and evaluations of one model; `Trainer` is a loop around it.

What makes updates is loaded when the first engine is built: importing all public names is fast.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.data import GlobalBatch, Microbatch, Part, Position
from evenstep.data.batch import named_batch
from evenstep.data.seeding import drawing_alone
from evenstep.data.split import samples_in
from evenstep.errors import ArgumentError, DataError, TaskError
from evenstep.events import Bus, Incident
from evenstep.internals import unwrapped
from evenstep.optim.schedules import LrSchedule
from evenstep.options import Training, check_length
from evenstep.parallel import Group, Strategy
from evenstep.precision import Precision
from evenstep.single_use import mark_used
from evenstep.train.failures import LOSS
from evenstep.train.progress import Progress
from evenstep.train.state import Tree
from evenstep.train.state.settings import check_parts, check_same_run
from evenstep.train.tasks.task import Task
from evenstep.train.tasks.tasks import connect, task_hooks
from evenstep.train.update.outcome import Aborted, Committed, SummedLoss

if TYPE_CHECKING:
    from evenstep.train.build import Parts

_NONE: Any = object()
_PARTS = ("model", "optimizer", "ema", "precision", "progress", "run")


@final
class Engine:
    """Computes updates of one model: one update is one update, however it is cut into micro-batches and ranks.

    Each rank gives the micro-batches that it runs. They are numbered over all ranks, beginning with rank 0, and the
    gradient is g = Σ ∇S_m / Σ w_m over all of them. The randomness of micro-batch k of update u is keyed by
    (seed, u, k), so parameters do not depend on which rank runs it, nor on random numbers that the caller draws.

    Args:
        model: any module. It is moved to the device and put into training mode.
        task: a `Task`, which says what a batch means; or a mapping of several tasks by name.
        optimizer: of the model's parameters, any of torch.optim except LBFGS, or a tuple of several.
        strategy: how ranks share the model and its gradients, as for `Trainer`.
        precision: the number formats, as a `Precision` or by name, such as "bf16-mixed"; float32 by default.
        lr_schedule: multiplies each group's learning rate, as for `Trainer`. None leaves the rates alone.
        updates: how many updates the schedule stretches over; needed by schedules that end.
        seed: of dropout and other random numbers in forwards. Give two engines of one program different seeds.
        device: "auto" takes the accelerator if there is one, else the CPU.
        train: how an update is computed: clipping, an average of the parameters, several tasks, checks.

    Attributes:
        group: all ranks that train the model.
        reducers: they sum gradients over data-parallel ranks, one for each stage.
        phases: where the time goes.
        ledger: dispatches updates and reads their verdicts, for a loop that lets an accelerator run ahead.

    Raises:
        ArgumentError: an argument is wrong; the message says what to write.
        TaskError: the model can't be trained.

    >>> class Line(Task):
    ...     loss = lambda self, output, batch: ((output - batch[1]) ** 2).sum()
    >>> x = torch.arange(4.0).unsqueeze(1)
    >>> model = nn.Linear(1, 1)
    >>> engine = Engine(model, Line(), torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    >>> for _ in range(200):  # each update has two micro-batches
    ...     outcome = engine.update(microbatches=[(x[:3], 2 * x[:3]), (x[3:], 2 * x[3:])])
    >>> type(outcome).__name__, outcome.update, outcome.weight, round(model.weight.item(), 1)
    ('Committed', 200, 4.0, 2.0)
    """

    _num_updates = 0  # of all engines: another engine's update may leave gradients in parameters

    def __init__(
        self,
        model: nn.Module,
        task: Task | Mapping[str, Task],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        strategy: Strategy | str | None = None,
        precision: Precision | str | None = None,
        lr_schedule: LrSchedule | str | Mapping[str, Any] | None = None,
        updates: int | None = None,
        seed: int = 42,
        device: str | torch.device = "auto",
        train: Training = Training(),
    ) -> None:
        from evenstep.train.build import Parts
        from evenstep.train.checks import check_launched, check_model, check_parts

        check_launched(strategy, model)
        check_model(model)
        if updates is not None:
            check_length(updates, None)
        parts = Parts(
            model=model,
            task=task,
            optimizer=optimizer,
            strategy=strategy,
            precision=precision,
            lr_schedule=lr_schedule,
            seed=seed,
            device=device,
            train=train,
        )
        check_parts(parts)
        schedule = parts.lr_schedule
        if schedule is not None and "epochs" in schedule.needs:
            raise ArgumentError(
                f"`lr_schedule` {type(schedule).__name__} counts epochs, which an engine does not know: let it count "
                f"updates, or train with a `Trainer`.",
                field="lr_schedule",
            )
        bus = Bus(task_hooks(parts.tasks), self)
        # on standard error, unless Python's `logging` is configured otherwise
        warn = logging.getLogger("evenstep").warning
        self._build(parts, updates=updates, bus=bus, report=lambda incident: warn(incident.message))
        mark_used(parts.kept)

    @classmethod
    def of(cls, parts: "Parts", *, updates: int | None, bus: Bus, report: Callable[[Incident], None]) -> Self:
        """The engine of a trainer; arguments as of `Parts.build`."""
        engine = cls.__new__(cls)
        engine._build(parts, updates=updates, bus=bus, report=report)
        return engine

    def _build(self, parts: "Parts", *, updates: int | None, bus: Bus, report: Callable[[Incident], None]) -> None:
        from evenstep.train.agreement import check_ties
        from evenstep.train.engine_state import EngineState
        from evenstep.train.evaluate import Evaluator
        from evenstep.train.ledger import Ledger

        parts.build(updates=updates, bus=bus, report=report)
        self.parts = parts
        context, execution, core = parts.context, parts.execution, parts.core
        self.model, self.optimizer, self.storage, self.bus = parts.model, parts.optimizer, parts.storage, bus
        self.group, self.reducers, self.phases = execution.world, execution.reducers, context.phases
        self.ledger = Ledger(core=core, execution=execution, context=context)
        self.state = EngineState(parts, self.ledger)
        self.evaluator = Evaluator(parts, self.ledger)
        self._last_loss: SummedLoss | None = None
        check_ties(unwrapped(self.model), core.trained.names)
        connect(self, parts.tasks)
        for parameter in self.model.parameters():
            parameter.grad = None
        self._num_before = Engine._num_updates

    @property
    def progress(self) -> Progress:
        """The counters of committed work."""
        return self.ledger.progress

    def update(self, batch: Any = _NONE, *, microbatches: Iterable[Any] | None = None) -> Committed | Aborted:
        """Make one update of all ranks' micro-batches; all ranks call it together.

        A gradient that overflows the loss scale of "16-mixed" is computed again at lower ones. After an abort nothing
        has changed; the next call is the same update again, with whatever batch it is given.

        Args:
            batch: one micro-batch as the task takes it, a `Batch(task=…, data=…)` or a pair (batch, task name). Or a
                `GlobalBatch`.
            microbatches: several micro-batches of this rank, in place of `batch`; none where it has nothing to do.

        Raises:
            EvenstepError: the update failed. Nothing has changed then, unless a note of the error says so.
            TaskError: a parameter has a gradient before the first update: `update` makes the backward itself.
        """
        given = _given(batch, microbatches)
        with self._alone("update"):
            before, was_whole = self.progress.update, self.parts.core.is_whole
            try:
                return self._update(given)
            except BaseException as error:
                if self.progress.update > before:
                    error.add_note(f"Update {before + 1} has been applied by then; go on with the next batch.")
                elif was_whole and not self.parts.core.is_whole:
                    error.add_note("It came while the state was changed, so it is that of no update; load another.")
                raise

    def _check_gradients(self) -> None:
        # other engines may leave gradients in this model, as in a GAN, but not before the first update of all
        is_first = self.progress.update == 0 and Engine._num_updates == self._num_before
        Engine._num_updates += 1
        for name, parameter in self.model.named_parameters() if is_first else ():
            if parameter.grad is not None:
                raise TaskError(
                    f"`{name}` has a gradient before the first update, which makes the backward itself: leave out your "
                    f"`backward()`, or set gradients to None.",
                    field=name,
                )

    def _alone(self, method: str) -> AbstractContextManager[None]:
        return drawing_alone(method) if self.group.ranks == 1 else nullcontext()

    def _update(self, given: Sequence[Any]) -> Committed | Aborted:
        update, context, ledger = self.progress.update + 1, self.parts.context, self.ledger
        self.group.at(update)
        with ledger.together():  # also where a rank gives what no micro-batch is: the others wait for it
            self._check_gradients()
            self.parts.core.require_whole()
            batch = global_batch(given, self.progress.position, self.reducers.group)
        self.storage.discard_from(0)  # what nobody has read of the update before
        undisturbed = context.randomness.undisturbed()
        with ledger.events(self.bus, batch), ledger.together(), undisturbed, torch.enable_grad():
            if self._last_loss is not None:
                self._last_loss.finish()  # before connections may be replaced
            self.parts.check_loss(batch)
            while True:
                pending = ledger.add(self.parts.compute(batch, self.progress))
                aborted = ledger.settle()
                if aborted is None:
                    self._last_loss = SummedLoss(self.storage.pending(LOSS, update=update), self.group)
                    return Committed(
                        update=update,
                        skipped_samples=pending.skipped_samples,
                        _norm=0.0 if pending.norm is None else pending.norm,
                        _weight=pending.total,
                        _loss=self._last_loss,
                        _metrics=partial(self._metrics, update),
                    )
                if aborted.incident.kind != "overflow":
                    return aborted

    def evaluate(self, batch: Any = _NONE, *, microbatches: Iterable[Any] | None = None) -> dict[str, float]:
        """The metrics of all ranks' micro-batches, forward only, by name: `{"loss": 0.3}`; all ranks call it together.

        Arguments are as for `update`. The parameters are those of the last committed update, or their average.
        """
        given = _given(batch, microbatches)
        with self.ledger.together():
            one = replace(global_batch(given, Position(), self.reducers.group), following=Position(epoch=1))
        with self._alone("evaluate"), self.ledger.together():
            return self.evaluator.once("evaluate", lambda _: (each for each in [one]), self.bus)

    def explain(self, aborted: Aborted) -> tuple[Incident, Exception]:
        """Find out where an aborted update went wrong, by running it again; all ranks call it together.

        Gives the incident with all that was found out, and an error to raise that says what to do.
        """
        return self.ledger.explain(aborted)

    def norms(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """‖v‖₂ of tensors such as gradients, by the names of the parameters that ranks hold in the same way.

        Norms are over all shards and stages, equal on all ranks, which call it together, and stay on the device.
        """
        return self.parts.execution.norms.each(values)

    def state_dict(self) -> Tree:
        """All that the next updates depend on, as a tree: a loop that loads it goes on with the same bits.

        All ranks call it together. Of a model in stages the first rank gets the whole, the others what they hold.
        Tensors may be the engine's own, which further updates change: `copy.deepcopy` what is to be gone back to.
        """
        if self.parts.execution.num_parts > 1:
            self.reducers.group.gather(None)  # what gathers shards would not notice that a rank is elsewhere
        return self.state.state_dict(whole=True)

    def load_state_dict(self, state: Tree) -> list[str]:
        """Restore a state of `state_dict`; returns messages about reset or changed parts, such as a rate.

        Raises:
            CheckpointError: it is of another model, optimizer, seed or precision. Nothing has been changed.
        """
        check_parts(state, _PARTS, "an engine")
        check_same_run(state["run"], self.state.identity)
        return self.state.load(self.state.own_part(state))

    def _metrics(self, update: int) -> Mapping[str, float]:
        records = self.storage.settle(self.group.gather)
        return {record.name.removeprefix("train/"): record.value for record in records if record.update == update}


def _given(batch: Any, microbatches: Iterable[Any] | None) -> Sequence[Any]:
    if (batch is _NONE) == (microbatches is None):
        raise TypeError("give one micro-batch, or several as `microbatches=[…]`")
    return [batch] if microbatches is None else [*microbatches]


def global_batch(given: Sequence[Any], position: Position, group: Group) -> GlobalBatch:
    """The global batch of the micro-batches that each rank gives, or the `GlobalBatch` given; ranks call it together.

    >>> batch = global_batch((["a"], (["b", "c"], "box")), Position(batch=7), Group())
    >>> [(one.index, one.task) for one in batch.microbatches], batch.following
    ([(0, ''), (1, 'box')], Position(epoch=0, batch=8))
    """
    if len(given) == 1 and isinstance(given[0], GlobalBatch):
        return given[0]
    mine = [named_batch(one) for one in given]
    told = group.gather([(one.task, _num_samples(one.data)) for one in mine])
    everything = [one for theirs in told for one in theirs]
    numbered = enumerate(mine, start=sum(len(theirs) for theirs in told[: group.rank]))
    # micro-batches of one task without a name are one batch, however many they are
    is_named = any(task for task, _ in everything)
    return GlobalBatch(
        position=position,
        following=position.after(ends_epoch=False),
        microbatches=tuple(
            Microbatch(index=number, data=one.data, num_samples=everything[number][1], task=one.task, counted=False)
            for number, one in numbered
        ),
        num_microbatches=len(everything),
        num_samples=sum(samples for _, samples in everything),
        parts=tuple(
            Part(task=task, num_microbatches=1, num_samples=samples) for task, samples in everything if is_named
        ),
    )


def _num_samples(data: object) -> int:
    try:
        return samples_in(data)
    except DataError:
        return 1
