"""The engine: updates and evaluations of one model; `Trainer` is a loop around it.

    update      all micro-batches of a global batch, over all ranks → `Committed` or `Aborted`
    evaluate    forwards of a global batch → metrics
    state_dict  all that the next updates depend on

It counts updates, and keeps those whose verdict is still on the device. It reads no data, writes no files, and does not
decide what to do about an abort: whoever calls it does. What makes updates is loaded when the first engine is built, so
that importing all public names takes little longer than importing torch.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep import training_mode
from evenstep.checkpoint import ALONE, RankGroup, on_all_ranks
from evenstep.data import Data, GlobalBatch, Position
from evenstep.data.seeding import drawing_alone
from evenstep.errors import EvenstepError, LostRankError, TaskError, clause
from evenstep.events import Bus, EvaluateEvent, Incident, Record, UpdateEvent
from evenstep.internals import unwrapped
from evenstep.optim.schedules import LrSchedule
from evenstep.options import Training, check_length
from evenstep.parallel import Strategy
from evenstep.precision import Precision
from evenstep.single_use import mark_used
from evenstep.train.cut import SplitLimit
from evenstep.train.failures import LOSS, Stop
from evenstep.train.global_batch import OneBatch, global_batch
from evenstep.train.progress import Progress
from evenstep.train.requests import Requests
from evenstep.train.state import Tree
from evenstep.train.state.settings import changed_settings, check_parts, check_same_run
from evenstep.train.tasks.metrics import build_storage
from evenstep.train.tasks.now import connect, task_hooks
from evenstep.train.tasks.task import Task
from evenstep.train.tasks.tasks import check_task_states, states_of
from evenstep.train.update.context import TrainContext
from evenstep.train.update.outcome import Aborted, Committed, PendingUpdate, SummedLoss, first_aborted

if TYPE_CHECKING:
    from evenstep.train.build import Setup

_EVALUATION = "evaluate"  # name of an evaluation in events
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
        bus: calls the task's methods for the events of updates.
        seed: see the arguments.
        recomputed: the names of the modules whose activations are not kept, of all stages.
        in_float8: the names of the linear layers whose products are in float8, of all stages.
        phases: where the time goes.

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

    _num_updates = 0  # of all engines: after those of others, parameters may have gradients

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
        from evenstep.train.build import set_up
        from evenstep.train.checks import check_own_loop
        from evenstep.train.failures import Policies

        if updates is not None:
            check_length(updates, None)
        setup = set_up(
            model=model,
            task=task,
            optimizer=optimizer,
            strategy=strategy,
            precision=precision,
            lr_schedule=lr_schedule,
            seed=seed,
            device=device,
            train=train,
            policies=Policies(non_finite=Stop()),
        )
        check_own_loop(setup.lr_schedule)
        bus = Bus(task_hooks(setup.tasks.by_name), cast("Any", self))
        # on standard error, unless Python's `logging` is told otherwise
        warn = logging.getLogger("evenstep").warning
        self._build(setup, updates=updates, bus=bus, report=lambda incident: warn(incident.message))
        self.prepare()
        mark_used(setup.kept)

    @classmethod
    def of(cls, setup: "Setup", *, updates: int | None, bus: Bus, report: Callable[[Incident], None]) -> Self:
        """The engine of a trainer, whose hooks, metrics and incidents go with it; arguments as of `build_parts`."""
        engine = cls.__new__(cls)
        engine._build(setup, updates=updates, bus=bus, report=report)
        return engine

    def _build(self, setup: "Setup", *, updates: int | None, bus: Bus, report: Callable[[Incident], None]) -> None:
        from evenstep.train.aborts import AbortCauses
        from evenstep.train.build import build_parts
        from evenstep.train.checks import check_ties

        self.parts = parts = build_parts(setup, updates=updates, bus=bus, report=report)
        self.model, self.optimizer, self.core = setup.model, setup.optimizer, parts.core
        self.storage, self.precision, self._compute = setup.storage, setup.precision, parts.compute
        self.group, self.reducers = parts.execution.world, parts.execution.reducers
        self.loss_scale = parts.context.loss_scale
        self.bus, self.seed, self._ema, self._report = bus, setup.seed, setup.train.ema, report
        self.phases = parts.context.phases
        self.recomputed, self.in_float8 = setup.recomputed.names, setup.linear_layers.names
        self._evaluated = (("", False),) if self._ema is None else self._ema.passes
        self.progress, self._begun = Progress(), Tree()
        self._pending, self._cuts = list[PendingUpdate](), dict[str, SplitLimit]()
        self._last_loss: SummedLoss | None = None
        check_ties(unwrapped(self.model), parts.core.trained.names)
        connect(self, setup.tasks.by_name)
        for parameter in self.model.parameters():
            parameter.grad = None
        self._num_before = Engine._num_updates
        self._causes = AbortCauses(parts.core, self.model, parts.execution, parts.context)

    # --- for loops of one's own

    def update(self, batch: Any = _NONE, *, microbatches: Iterable[Any] | None = None) -> Committed | Aborted:
        """Make one update of all ranks' micro-batches; all ranks call it together.

        A gradient that overflows the loss scale of "16-mixed" is computed again at lower ones. After an abort nothing
        has changed; the next call is the same update again, with whatever batch it is given.

        Args:
            batch: one micro-batch as the task takes it, a `Batch(task=…, data=…)` or a pair (batch, task name). Or a
                `GlobalBatch`.
            microbatches: several micro-batches of this rank, in place of `batch`; none where it has nothing to do.

        Raises:
            TaskError: a parameter has a gradient before the first update: `update` makes the backward itself.
            EvenstepError: the update failed. Nothing has changed then, unless a note of the error says so.
        """
        given = _given(batch, microbatches)
        with self._alone("update"):
            before, was_whole = self.progress.update, self.core.is_whole
            try:
                return self._update(given)
            except BaseException as error:
                if self.progress.update > before:
                    error.add_note(f"Update {before + 1} has been applied by then; go on with the next batch.")
                elif was_whole and not self.core.is_whole:
                    error.add_note("It came while the state was changed, so it is that of no update; load another.")
                raise

    def _alone(self, method: str) -> AbstractContextManager[None]:
        return drawing_alone(method) if self.group.ranks == 1 else nullcontext()

    def _update(self, given: Sequence[Any]) -> Committed | Aborted:
        update, context = self.progress.update + 1, self.parts.context
        self.group.at(update)
        with self.together():  # also where a rank gives what no micro-batch is: the others wait for it
            self.require_whole()
            self._check_gradients()
            batch = global_batch(given, self.progress.position, self.reducers.group)
        self.storage.discard_from(0)  # what nobody has read of the update before
        undisturbed = context.randomness.undisturbed(context.device)
        with self._update_span(update, batch), self.together(), undisturbed, torch.enable_grad():
            if self._last_loss is not None:
                self._last_loss.finish()  # before connections may be made anew
            self.parts.check_loss(batch)
            while True:
                pending, aborted = self.dispatch(batch), self.settle()
                if aborted is None:
                    self.after_update(pending.number)
                    self._last_loss = SummedLoss(self.storage.pending(LOSS, update=update), self.group)
                    return Committed.of(pending, self._last_loss, partial(self._metrics, update))
                if aborted.incident.kind != "overflow":
                    return aborted
                self.lower_scale()

    def _check_gradients(self) -> None:
        if self.progress.update == 0 and Engine._num_updates == self._num_before:
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    raise TaskError(
                        f"`{name}` has a gradient before the first update, which makes the backward itself: leave out "
                        f"your `backward()`, or set gradients to None.",
                        field=name,
                    )
        Engine._num_updates += 1

    def evaluate(self, batch: Any = _NONE, *, microbatches: Iterable[Any] | None = None) -> dict[str, float]:
        """The metrics of all ranks' micro-batches, forward only, by name: `{"loss": 0.3}`; all ranks call it together.

        Evaluated are the parameters as of the last committed update, or what `Ema(evaluated=…)` says.

        Args:
            batch: as for `update`, and `microbatches`.
        """
        given = _given(batch, microbatches)
        with self.together():
            one = OneBatch(replace(global_batch(given, Position(), self.reducers.group), ends_epoch=True))
        context = self.parts.context
        apart = replace(context, storage=build_storage(context.tasks, context.device))
        values: dict[str, float] = {}
        with self._alone("evaluate"), self.evaluation_span(_EVALUATION, values), self.together():
            values |= {record.name: record.value for record in self.evaluated(_EVALUATION, one, context=apart)}
        return {name.removeprefix(f"{_EVALUATION}/"): value for name, value in values.items()}

    def _update_span(self, update: int, batch: GlobalBatch) -> AbstractContextManager[None]:
        def end(error: BaseException | None) -> UpdateEvent:
            committed = error is None and self.progress.update >= update
            return replace(begin, committed=committed, num_samples=batch.num_samples)

        begin = UpdateEvent(update=update, num_microbatches=batch.num_microbatches)
        return self.bus.span("update", lambda: begin, end)

    def evaluation_span(self, name: str, values: Mapping[str, float]) -> AbstractContextManager[None]:
        """Events around an evaluation.

        Args:
            name: of the evaluation.
            values: its metrics by name, complete at the end.
        """
        update = self.progress.update
        return self.bus.span(
            "evaluate",
            lambda: EvaluateEvent(update=update, name=name),
            lambda error: EvaluateEvent(update=update, name=name, metrics=values),
        )

    def require_whole(self) -> None:
        """Raise EvenstepError where an error has left the state of no update: nothing may be made of it, nor saved."""
        if not self.core.is_whole:
            raise EvenstepError(
                "an error has come while the state was changed, so it is that of no update; load another, by "
                "`load_state_dict` or a trainer's `resume`, or build model, optimizer and engine anew."
            )

    def average_output(self, inputs: Any) -> Any:
        """Output of the average for `inputs`; see `Now.teacher`."""
        assert self.parts.teacher is not None, "an engine without an average refuses such tasks"
        return self.parts.teacher(inputs, self.parts.context)

    def explain(self, aborted: Aborted, incident: Incident | None = None) -> tuple[Incident, Exception]:
        """Find out where an aborted update went wrong, by running it again; all ranks call it together.

        Args:
            incident: that of it, if more is to be said in it.

        Returns:
            The incident with all that was found out, and an error to raise that says what to do.
        """
        return self._causes.ending(incident or aborted.incident, aborted.pending)

    def state_dict(self) -> Tree:
        """All that the next updates depend on, as a tree: a loop that loads it goes on with the same bits.

        All ranks call it together. Of a model in stages the first rank gets the whole, the others what they hold.
        Tensors may be the engine's own, which further updates change: `copy.deepcopy` what is to be gone back to.
        """
        if self.parts.execution.num_parts > 1:
            self.reducers.group.gather(None)  # what gathers shards would not notice that a rank is elsewhere
        return {**self.tensors(whole=True), **self.counters()}

    def counters(self) -> Tree:
        """The parts "progress", "tasks", "lr_schedule" and "run" of a state."""
        return {
            "progress": self.progress.state_dict(),
            "tasks": states_of(self.parts.context.tasks),
            "lr_schedule": self.core.learning_rates.state_dict(),
            "run": self.described(),
        }

    def described(self) -> Tree:
        """Description of the run in its state: seed, precision, and settings of updates.

        With `trained_by` too, where an optimizer evaluates other parameters than those it trains, which a state holds.
        """
        modes = self.parts.modes.names
        trained_by = {"trained_by": ", ".join(modes)} if modes else {}
        settings = self.parts.settings
        own = {"seed": self.seed, "precision": self.precision.name, "settings": settings, "begun": self._begun}
        return {**own, **trained_by}

    def changed_settings(self, state: Tree) -> dict[str, str]:
        """Messages about settings of updates that differ from `state`, by name.

        Args:
            state: as `own_part` gave it.
        """
        told = changed_settings(state["run"].get("settings", {}), self.parts.settings)
        options = "; ".join(self.parts.saved.changed_options(state))
        frozen = self.parts.saved.trained.changed(state.get("trained", {}))
        return {name: said for name, said in {"optimizer": options, "frozen": frozen, **told}.items() if said}

    def load_state_dict(self, state: Tree) -> list[str]:
        """Restore a state of `state_dict`; returns messages about reset or changed parts, such as a rate.

        Raises:
            CheckpointError: it is of another model, optimizer, seed or precision. Nothing has been changed.
        """
        check_parts(state, _PARTS, "an engine")
        check_same_run(state["run"], {"seed": self.seed, "precision": self.precision.name})
        return self.load_own(self.own_part(state))

    # --- for a loop that lets an accelerator run ahead, as `Trainer`'s does

    def dispatch(self, batch: GlobalBatch) -> PendingUpdate:
        """Compute one update, and apply it where its gradient is finite; the device may be at it still on return."""
        pending = self._compute(batch, self.progress)
        self._pending.append(pending)
        progress = pending.before.committed(pending.batch, skipped_samples=pending.skipped_samples)
        self.progress = progress
        self.loss_scale.committed()
        return pending

    @property
    def num_pending(self) -> int:
        """Number of dispatched updates whose verdict the host has not read."""
        return len(self._pending)

    def settle(self) -> Aborted | None:
        """Learn what became of all dispatched updates: the first that was aborted, or None.

        After an abort the counters are those before it, and updates that were dispatched since were not applied.
        """
        updates, index = self._undispatched()
        self.core.settle(None if index is None else updates[index].number)
        if index is None:
            return None
        first = updates[index]
        self.storage.discard_from(first.number)
        self._go_back_before(first)
        self.core.resume()
        since = tuple(one.batch for one in updates[index + 1 :])
        return Aborted(incident=self._causes.incident(first), pending=first, since=since)

    def after_update(self, number: int) -> None:
        """End update `number`: where it is not known to be aborted, nothing that follows takes it back.

        Raises:
            ReplicaError: the ranks' parameters have become different.
        """
        if self.progress.update >= number:
            self.reducers.after_update(number)

    def lower_scale(self) -> None:
        """Let an update that overflowed be tried again; raises NonFiniteError where there is no lower loss scale."""
        self._causes.lower_scale()

    def skip(self, batch: GlobalBatch) -> None:
        """Count `batch` as taken without an update."""
        self.progress = self.progress.without(batch)

    def begin(self) -> None:
        """Before a pass over the data: nothing is pending, and buffers are as they are now."""
        self.require_whole()
        self._pending.clear()
        self.core.begin()

    def abandon(self) -> None:
        """Roll back uncommitted updates after an error."""
        updates, index = self._undispatched()
        if index is not None:
            self._go_back_before(updates[index])
        self.core.abandon(None if index is None else updates[index].number)
        self.storage.discard_from(self.progress.update + 1)

    def _undispatched(self) -> tuple[list[PendingUpdate], int | None]:
        updates = self._pending.copy()
        self._pending.clear()
        return updates, first_aborted(updates)

    def _go_back_before(self, update: PendingUpdate) -> None:
        self.progress = update.before
        self.loss_scale.load_state_dict(update.loss_scale)
        self.core.learning_rates.restore(update.rates)

    # --- for whoever evaluates and saves

    @property
    def is_whole(self) -> bool:
        """True if this rank's state is that of the last committed update."""
        return self.core.is_whole

    def stretch(self, updates: int | None) -> None:
        """Let schedules stretch over a run of so many updates.

        Raises:
            ArgumentError: one does not fit into it, or the average would not move in it.
        """
        self.parts.context.coefficients.check(updates)
        if self._ema is not None:
            self._ema.check(updates)
        self.core.learning_rates.updates = updates

    def prepare(self) -> None:
        """Put model, optimizer and normalisation layers into training mode."""
        training_mode.train(self.model)
        self.parts.modes.train()
        for layer in self.parts.context.frozen_norms:
            layer.eval()
        self.parts.saved.flags.begin()

    @contextmanager
    def evaluating(self, *, average: bool | None = None) -> Generator[None]:
        """Inside, the parameters are the average's, where that is to be evaluated (first), or else the optimizer's."""
        self.require_whole()
        takes_average = self._evaluated[0][1] if average is None else average
        values = self.parts.saved.average if takes_average else None
        with self.parts.modes.evaluating(), nullcontext() if values is None else values.swapped():
            yield

    def evaluated(
        self,
        name: str,
        data: Data,
        *,
        context: TrainContext | None = None,
        requests: Requests | None = None,
        batches: int | None = None,
    ) -> list[Record]:
        """The metrics of the evaluation `name` on `data`, by the tasks of `context`; all ranks call it together.

        Args:
            requests: an urgent stop raises BrokenOff.
            batches: how many to evaluate; None for one epoch.
        """
        from evenstep.train.evaluate import Evaluation

        records: list[Record] = []
        context = context or self.parts.context
        for below, average in self._evaluated:
            evaluation = Evaluation(
                name=name,
                below=below,
                data=data,
                model=self.model,
                context=replace(context, cuts=self._cuts.setdefault(name, SplitLimit(sums=context.cuts.sums))),
                execution=self.parts.execution,
                requests=requests or Requests(),
                batches=batches,
            )
            with self.evaluating(average=average):
                records += evaluation(self.progress.update)
        return records

    def tensors(self, *, whole: bool) -> Tree:
        """The parts of a state that `TrainState` has; all ranks call it together.

        Args:
            whole: False to leave tensors that are cut over ranks as they are, which costs no memory.
        """
        self.require_whole()
        return self.parts.saved.state_dict(whole=whole)

    def own_part(
        self, state: Tree, *, take: Callable[[Tensor, Tensor], Tensor] | None = None, ranks: RankGroup = ALONE
    ) -> Tree:
        """This rank's part of a whole state, compared with the live one; see `TrainState.own_part`."""
        own = self.parts.saved.own_part(state, take=take, ranks=ranks)
        on_all_ranks(ranks, lambda: check_task_states(own.get("tasks", {}), self.parts.context.tasks))
        return own

    def load_own(self, state: Tree) -> list[str]:
        """Restore a state of `own_part`; returns messages about reset or dropped parts."""
        settings = [*self.changed_settings(state).values()]
        self.progress = Progress.from_state_dict(state["progress"])
        self.core.is_whole = False  # until all of it is loaded
        for name, theirs in state.get("tasks", {}).items():
            task = self.parts.context.tasks.get(name)
            if task is not None and (theirs or task.state_dict()):
                task.load_state_dict(theirs)
        changed = settings + self.parts.saved.load_state_dict(state)
        changed += self.core.learning_rates.load_state_dict(state.get("lr_schedule", {}))
        self._begun = state["run"].get("begun") or {}
        self.core.learning_rates.reloaded(self._begun.get("lr_schedule", 0))
        self.core.is_whole = True
        return changed

    @contextmanager
    def together(self) -> Generator[None]:
        """Around what all ranks do together: what raises inside leaves nothing half done, and no other rank waiting."""
        self.group.go_on()
        try:
            yield
        except BaseException as raised:
            error = self.group.explained(raised)
            if not isinstance(error, LostRankError):
                self.group.fail(clause(error))
            self.abandon()
            if error is raised:
                raise
            raise error from raised

    def _metrics(self, update: int) -> Mapping[str, float]:
        records = self.storage.settle(self.group.gather)
        return {record.name.removeprefix("train/"): record.value for record in records if record.update == update}


def _given(batch: Any, microbatches: Iterable[Any] | None) -> Sequence[Any]:
    if (batch is _NONE) == (microbatches is None):
        raise TypeError("give one micro-batch, or several as `microbatches=[…]`")
    return [batch] if microbatches is None else [*microbatches]
