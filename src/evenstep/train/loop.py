"""The loop: updates until the run is done, asked to stop, or fails.

    for each epoch:                                   before_epoch … after_epoch
      take the next global batch
      update, and settle it                           before_update … after_update
      every `log_every_updates`: write the metrics
      do what was requested: evaluate, save, stop     for an epoch's last update: behind after_epoch

To settle is to learn which of the dispatched updates were committed. On a CPU that is known at once. Where the
verdict stays on the device it is read every `settle_every_updates`, and always before anything that must not be undone
(an evaluation, a checkpoint, the end of an epoch). What is done about an aborted update is a policy's decision: its
batch is taken again or left out, with those that were taken since; or the run goes back further, to a checkpoint, and
begins from there with a new pass over the data. Each step returns why the loop must leave it: `End`, `GoBack`, or None.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, cast, final

from evenstep.data import GlobalBatch
from evenstep.errors import DataError
from evenstep.events import EpochEvent, Incident, Record, UpdateEvent
from evenstep.train.checkpointing.checkpointer import Checkpointer
from evenstep.train.engine import Engine
from evenstep.train.evaluations import Evaluations
from evenstep.train.failures import Answer, Decision, Policies, spike_error
from evenstep.train.feed import Feed
from evenstep.train.reporter import Reporter
from evenstep.train.requests import End, GoBack, Requests
from evenstep.train.update.outcome import Aborted

_NOTHING: Mapping[str, Any] = MappingProxyType({})
Leave: TypeAlias = "End | GoBack | None"


@final
@dataclass(slots=True, kw_only=True)
class Loop:
    """Makes updates until the run is over.

    Args:
        updates: how many to commit; None: until the data ends.
        epochs: how many epochs to take; None: as many as the updates need.
        log_every_updates: how often metrics are written.
        settle_every_updates: how many updates may be dispatched before their verdicts are read.
        tryout: called once with the first global batch, before anything is trained on it.
    """

    engine: Engine
    feed: Feed
    policies: Policies
    evaluator: Evaluations
    checkpointer: Checkpointer
    reporter: Reporter
    requests: Requests
    updates: int | None
    epochs: int | None
    log_every_updates: int
    settle_every_updates: int
    tryout: Callable[[GlobalBatch], None] | None = None
    _has_remarked: bool = False

    def run(self) -> End:
        """Make updates until the run is over or asked to stop, from where the engine is; then evaluate and save."""
        while True:
            self.engine.bus.of_run = None
            self.engine.begin()
            with self.feed.opened(self.engine.progress.position):
                self._try_out()
                leave = self.act() or self._ended()  # an evaluation may be due, before which a run has ended
                while leave is None:
                    leave = self._epoch()
                    if not isinstance(leave, GoBack):
                        leave = self.act() or leave or self._ended()
                if isinstance(leave, End):
                    leave = self._write() or leave
            if isinstance(leave, End):
                self._finish(leave)
                return leave
            self._go_back(leave)

    def end(self) -> End | None:
        progress = self.engine.progress
        if self.updates is not None and progress.update >= self.updates:
            return End(f"all {self.updates} updates are done")
        if self.epochs is not None and progress.position.epoch >= self.epochs:
            return End(f"all {self.epochs} epochs are done")
        return End(f"the data ended after {progress.update} updates") if self.feed.ended else None

    def settle(self) -> GoBack | None:
        aborted = self.engine.settle()
        return None if aborted is None else self._answer(aborted)

    def settle_between_updates(self, *, write: bool = True) -> None:
        """The same for hooks and users, who can't leave the loop: it goes back, if it must, when the update has ended.

        Args:
            write: whether metrics are written as well.
        """
        try:
            leave = self.settle() or (self._write() if write else None)
        except Exception as error:
            self.engine.bus.of_run = error  # in a hook that calls this it is no failure of the hook
            raise
        self.requests.go_back = self.requests.go_back or leave

    def act(self) -> Leave:
        requests, group = self.requests, self.engine.group
        if self.engine.bus.of_run is not None:  # kept by a hook to itself
            raise self.engine.bus.of_run
        self.checkpointer.poll()
        go_back, requests.go_back = requests.go_back, None
        if go_back is not None:
            return go_back
        agreed = requests.agree(group)
        if not (agreed.evaluate or agreed.save):
            return agreed.stop
        leave: Leave = self.settle() or self._write()
        if leave is not None:
            return leave
        agreed = requests.agree(group)  # the update at which it was requested may not have happened
        # what is saved at the end knows of the evaluation there, which would be made again by a run that goes on
        is_last = agreed.save and agreed.stop is None and self.end() is not None and self.evaluator.due
        if agreed.evaluate or is_last:
            with requests.granting("evaluate"):
                self.evaluator.all()
                agreed = requests.agree(group)
            leave = self._write() if agreed.save else None  # what hooks have put when they heard of it
        if agreed.save and leave is None:
            with requests.granting("save"), self.engine.phases.only("save"):
                self.checkpointer.begin()
        return leave or agreed.stop

    def abandon(self) -> None:
        dispatched = self.engine.progress.update
        self.feed.forget()
        self.engine.abandon()
        if self.engine.progress.update != dispatched:
            self.requests.forget_actions()

    def write_known(self) -> list[Record]:
        engine = self.engine
        return self.reporter.settle(
            engine.storage, update=engine.progress.update, limit=engine.parts.context.cuts.limit
        )

    def _ended(self) -> Leave:
        if self.end() is None:
            return None
        return self.settle() or self.end()

    def _try_out(self) -> None:
        if self.tryout is None or self.end() is not None:
            return
        batch = self.feed.peek()
        if batch is not None:
            self.tryout(batch)
        self.tryout = None

    def _epoch(self) -> Leave:
        engine = self.engine
        epoch = engine.progress.position.epoch
        with engine.bus.span(
            "epoch",
            lambda: EpochEvent(update=engine.progress.update, epoch=epoch),
            lambda error: EpochEvent(
                update=engine.progress.update, epoch=epoch, complete=engine.progress.position.epoch > epoch
            ),
        ):
            leave: Leave = self.requests.agree(engine.group).stop
            while leave is None and engine.progress.position.epoch == epoch:
                leave = self._ended()
                if leave is not None:
                    break
                engine.group.at(engine.progress.update + 1)
                began = engine.phases.lap("loop")
                batch = self.feed.take()
                data_s = engine.phases.lap("data") - began
                if batch is None:
                    self._end_of_data()
                elif self.feed.is_given_up(batch):
                    leave = self.settle()
                    engine.skip(batch)
                else:
                    leave = self._one(batch, began=began, data_s=data_s) or self._after(batch)
            return leave if isinstance(leave, GoBack) else self.settle() or leave

    def _after(self, batch: GlobalBatch) -> Leave:
        leave: Leave = self.settle() if batch.ends_epoch else None
        if leave is None and self.engine.progress.update % self.log_every_updates == 0:
            leave = self.settle() or self._write()
        if leave is None and self.engine.progress.position.epoch == batch.position.epoch:
            leave = self.act()
        return leave

    def _end_of_data(self) -> None:
        progress = self.engine.progress
        if progress.position.batch == 0 and progress.position.epoch == 0:
            raise DataError("the training data gave no global batch at all; look at its length and filters.")
        self.feed.ended = True
        if self.updates is not None or progress.position.epoch < cast("int", self.epochs):
            wanted = f"{self.epochs} epochs" if self.updates is None else f"{self.updates} updates"
            why = "end there, as a `MapData` with `num_epochs` does. Leave that out, or"
            if self.feed.data.state is not None:
                why = "can be iterated only once, as a generator. Give an object whose `__iter__` begins anew, or"
            message = (
                f"the data ended after {progress.update} updates, before the {wanted} that were asked for: they {why} "
                f"ask for fewer."
            )
            self.reporter.report(Incident(kind="data_ended", update=progress.update, message=message))

    def _one(self, batch: GlobalBatch, *, began: float, data_s: float) -> GoBack | None:
        engine, leave, skipped = self.engine, None, 0
        number, lap = engine.progress.update + 1, engine.phases.lap
        if engine.parts.check_loss.pending:
            with engine.phases.only("check"):
                engine.parts.check_loss(batch)
            began = lap("loop") - data_s
        waited_s = engine.reducers.group.waited_s
        if not self._has_remarked:
            self._remark()
        if batch.faults:
            self.reporter.data_faults(batch, number)
        with engine.bus.span(
            "update",
            lambda: UpdateEvent(
                update=number,
                num_microbatches=batch.num_microbatches,
                data_s=data_s,
                task_data_s=_by_task(batch, "data_s") if batch.parts else _NOTHING,
            ),
            lambda error: UpdateEvent(
                update=number,
                num_microbatches=batch.num_microbatches,
                committed=error is None and engine.progress.update >= number,
                num_samples=batch.num_samples - skipped,
                task_samples=_by_task(batch, "num_samples") if batch.parts else _NOTHING,
            ),
        ):
            lap("hooks")
            pending = engine.dispatch(batch)
            skipped = pending.skipped_samples
            self.feed.used(number, batch)
            if skipped:
                self.feed.count_skipped(skipped)
            if pending.is_known_aborted or engine.num_pending >= self.settle_every_updates:
                leave = self.settle()
            lap("apply")  # or what is left of it, where the update is one graph
        if engine.progress.update < number and not engine.num_pending:
            engine.storage.discard_from(number)  # what hooks have put after it: it is made again, or another is
        engine.after_update(number)
        self.reporter.busy(lap("hooks") - began - (engine.reducers.group.waited_s - waited_s))
        return leave

    def _remark(self) -> None:
        self._has_remarked, engine = True, self.engine
        state = self.feed.data.state
        if self.checkpointer.enabled and state is not None and state.positions == "epochs":
            message = (
                "the stream has no `state_dict`: checkpoints are kept, but a resume begins the stream at its epoch's "
                "start. To resume exactly, give it `state_dict` and `load_state_dict`; torchdata's "
                "`StatefulDataLoader` has both."
            )
            self.reporter.report(Incident(kind="loader", update=engine.progress.update, message=message))
        outside = engine.core.trained.outside_names
        if outside:
            incident = Incident(
                kind="not_in_optimizer",
                update=engine.progress.update,
                message=(
                    f"{len(outside)} parameters get gradients but are not in the optimizer, first `{outside[0]}`: give "
                    f"them to the optimizer, or set `requires_grad_(False)`."
                ),
                rank=engine.group.rank if engine.parts.execution.in_stages else None,
                tensors=tuple(outside[:20]),
            )
            self.reporter.report(incident)

    def _answer(self, aborted: Aborted) -> GoBack | None:
        self.requests.forget_actions()
        batch, number = aborted.pending.batch, aborted.pending.number
        decision = self.policies.about_abort(aborted.incident)
        if decision.answer is Answer.STOP:
            self._stop_for(aborted, decision.incident)
        self.reporter.report(decision.incident)
        if decision.answer in (Answer.REWIND, Answer.REWIND_PAST):
            self.feed.used(number, batch)
            return self._back_before(decision)
        again = [batch, *aborted.since]
        if decision.answer is Answer.SKIP:
            self.engine.skip(again.pop(0))
        elif aborted.incident.kind == "overflow":
            self.engine.lower_scale()
        self.feed.take_again(again)
        return None

    def _stop_for(self, aborted: Aborted, incident: Incident) -> NoReturn:
        incident, error = self.engine.explain(aborted, incident)
        self.reporter.report(incident)
        raise error

    def _write(self) -> GoBack | None:
        engine = self.engine
        update = engine.progress.update
        engine.phases.lap("loop")
        records = self.write_known()
        engine.phases.lap("write")
        decision = self.policies.about_spikes(records, engine.storage)
        if decision is None:
            return None
        self.reporter.report(decision.incident)
        if decision.answer is Answer.STOP:
            raise spike_error(decision.incident, update)
        return self._back_before(decision) if decision.answer in (Answer.REWIND, Answer.REWIND_PAST) else None

    def _back_before(self, decision: Decision) -> GoBack:
        update, past = decision.incident.update, None
        if decision.answer is Answer.REWIND_PAST:
            past = self.feed.end_of(update) or self.engine.progress.position
        return GoBack(update=update, past=past, fault=decision.incident.message)

    def _go_back(self, leave: GoBack) -> None:
        self.requests.forget_actions()
        self.checkpointer.go_back(leave.update, leave.fault)
        self.policies.went_back()
        if leave.past is not None:
            self.feed.give_up(self.engine.progress.position, leave.past)

    def _finish(self, end: End) -> None:
        evaluates = end.outcome == "done" and bool(self.evaluator.due)
        if evaluates:
            self.evaluator.all()
        wanted, self.requests.save = self.requests.save or evaluates, False  # also by what has heard of the evaluation
        checkpointer = self.checkpointer
        checkpointer.settle()
        if checkpointer.enabled and (wanted or checkpointer.saved_at != self.engine.progress.update):
            self._write()
            checkpointer.save()


def _by_task(batch: GlobalBatch, count: Literal["data_s", "num_samples"]) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for part in batch.parts:
        if part.task:
            counts[part.task] = counts.get(part.task, 0) + getattr(part, count)
    return counts
