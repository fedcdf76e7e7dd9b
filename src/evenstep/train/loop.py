"""The loop: updates until the run is done, asked to stop, or fails.

    for each epoch:                                   before_epoch … after_epoch
      take the next global batch
      update, and settle it                           before_update … after_update
      every `log_every_updates`: write the metrics
      do what was asked: evaluate, save, stop

To settle is to learn which of the dispatched updates were committed. On a CPU that is known at once. Where the
verdict stays on the device it is read every `settle_every_updates`, and always before anything that must not be undone
(an evaluation, a checkpoint, the end of an epoch). If an update was aborted the loop goes back to it: the device has
applied nothing since, so only counters move, and the batches taken since are taken again. To rewind is to go back
further, to a checkpoint, and to begin from there with a new pass over the data. It does not open files, build objects
or know what comes before and after training; that is the trainer's.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, cast, final

from torch import nn

from evenstep.data import Data, GlobalBatch, Position
from evenstep.errors import DataError
from evenstep.events import Bus, EpochBegin, EpochEnd, Incident, Storage, UpdateBegin, UpdateEnd
from evenstep.precision import Precision
from evenstep.train.aborts import Aborts
from evenstep.train.execution import Execution
from evenstep.train.failures import Answer, FailurePolicy
from evenstep.train.guard import Guard
from evenstep.train.outcome import Entry, first_aborted
from evenstep.train.progress import Progress
from evenstep.train.remarks import Remarks
from evenstep.train.requests import Asks
from evenstep.train.update import Update


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What the loop asks of the trainer.

    Args:
        write: hand all settled metrics to the writers.
        evaluate: evaluate the parameters as of now.
        save: write a checkpoint of the state as of now.
        report: tell hooks and writers about an incident.
        poll: take note of a save that goes on in the background.
        rewind: go back, in place, to the newest checkpoint of fewer updates than given.
    """

    write: Callable[[], None]
    evaluate: Callable[[], object]
    save: Callable[[], object]
    report: Callable[[Incident], None]
    poll: Callable[[], None]
    rewind: Callable[[int], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewinding:
    """A rewind that was decided on.

    Args:
        update: the one that must not have happened.
        past: the end of the data to be given up; None: the data are taken again.
    """

    update: int
    past: Position | None


@final
@dataclass(slots=True, kw_only=True)
class Loop:
    """Executes updates and keeps count of them.

    Args:
        update: executes one.
        guard: looks, before the first update, whether the losses are sums.
        model: what it trains; watched when the run must stop because of a number that is not finite.
        data: gives the global batches.
        execution: on which ranks, and which of them takes which micro-batches.
        precision: learns which updates were committed.
        bus: told of epochs and updates.
        storage: from which the metrics of aborted updates are removed.
        actions: what the trainer does.
        on_non_finite: the policy for gradients that are inf or NaN.
        updates: how many to commit; None: until the data ends.
        epochs: how many epochs to take; None: as many as the updates need.
        seed: of order and randomness.
        pin_memory: whether batches are put in pinned memory.
        log_every_updates: how often metrics are written.
        settle_every_updates: how many updates may be dispatched before their verdicts are read.
        max_skipped_samples: how many samples that can't be read may be left out before the run stops.
        fit_memory: whether to find out, at the first global batch, how finely micro-batches must be cut.
        asks: what was asked for.
        progress: what is committed, and for a while what is believed to be.
        failed: the batch and the number of the update that is under way, or that ended the run.
        under_way: the number of the update that is being computed just now, or 0.
    """

    update: Update
    guard: Guard
    model: nn.Module
    data: Data
    execution: Execution
    precision: Precision
    bus: Bus
    storage: Storage
    actions: Actions
    on_non_finite: FailurePolicy
    updates: int | None
    epochs: int | None
    seed: int
    pin_memory: bool
    log_every_updates: int
    settle_every_updates: int
    max_skipped_samples: int
    fit_memory: bool
    asks: Asks = field(default_factory=Asks)
    progress: Progress = field(default_factory=Progress)
    _ledger: list[Entry] = field(default_factory=list)
    _again: deque[GlobalBatch] = field(default_factory=deque)
    _data_ended: bool = False
    failed: tuple[GlobalBatch, int] | None = None
    under_way: int = 0
    _rewinding: _Rewinding | None = None
    _given_up: list[tuple[Position, Position]] = field(default_factory=list)
    _positions: deque[tuple[int, Position]] = field(default_factory=lambda: deque[tuple[int, Position]](maxlen=10_000))
    _busy_s: float = 0.0
    _busy_updates: int = 0
    _skipped_samples: int = 0
    _aborts: Aborts = field(init=False)
    _remarks: Remarks = field(default_factory=Remarks)

    def __post_init__(self) -> None:
        self._aborts = Aborts(
            update=self.update,
            model=self.model,
            execution=self.execution,
            precision=self.precision,
            storage=self.storage,
            on_non_finite=self.on_non_finite,
        )

    def run(self) -> None:
        """Execute updates until the run is over or asked to stop, from where `progress` is."""
        while True:
            self._pass()
            if self._rewinding is None:
                return
            self._go_far_back(self._rewinding)

    def _pass(self) -> None:
        """Execute updates until the run is over, or has to be rewound."""
        self._ledger.clear()
        self._again.clear()
        self._data_ended = False
        self.failed = None
        self.update.begin()
        strategy = self.execution.strategy
        batches = self.data.batches_together(
            self.progress.position,
            seed=self.seed,
            rank=strategy.rank,
            ranks=strategy.ranks,
            total=strategy.group.sum_floats,
            pin_memory=self.pin_memory,
        )
        with closing(cast("Any", batches)):
            if self.fit_memory and not self._over():
                self._fit(batches)
            while not self._over():
                self._epoch(batches)
                self.act()
            if self._rewinding is None:
                self.actions.write()

    def _fit(self, batches: Iterator[GlobalBatch]) -> None:
        batch = next(batches, None)
        if batch is not None:
            self._again.append(batch)
            self.update.fit(batch)
        self.fit_memory = False

    def rewind(self, incident: Incident, answer: Answer) -> None:
        """Go back, as soon as nothing is half done, to the newest checkpoint before `incident`."""
        past = None
        if answer is Answer.REWIND_PAST:
            taken = [position for update, position in self._positions if update == incident.update]
            past = taken[-1] if taken else self.progress.position
        self._rewinding = _Rewinding(update=incident.update, past=past)

    def _go_far_back(self, rewinding: _Rewinding) -> None:
        self._rewinding = None
        self.actions.rewind(rewinding.update)
        self.asks.forget_actions()
        if rewinding.past is not None:
            self._given_up.append((self.progress.position, rewinding.past))

    def take_busy_s(self) -> float:
        """Seconds per update that this rank was busy since it was last asked; 0 without an update."""
        busy_s = self._busy_s / self._busy_updates if self._busy_updates else 0.0
        self._busy_s, self._busy_updates = 0.0, 0
        return busy_s

    def abandon(self) -> None:
        """Forget what was not committed, after something has raised in the middle of it."""
        entries = self._ledger.copy()
        self._ledger.clear()
        self._again.clear()
        place = first_aborted(entries)
        if place is not None:
            self.progress, self.precision.state = entries[place].before, entries[place].precision
        self.update.abandon()
        self.storage.discard_from(self.progress.update + 1)

    def why_over(self) -> str:
        """Why the loop ended, or "" if there is more to do."""
        if self.asks.stop:
            return self.asks.stop
        if self.updates is not None and self.progress.update >= self.updates:
            return f"all {self.updates} updates are done"
        if self.epochs is not None and self.progress.position.epoch >= self.epochs:
            return f"all {self.epochs} epochs are done"
        return f"the data ended after {self.progress.update} updates" if self._data_ended else ""

    def _over(self) -> bool:
        if self._rewinding is not None:
            return True
        if not self.why_over():
            return False
        self.settle()  # may find that an update must be done again
        return bool(self.why_over() or self._rewinding)

    def _epoch(self, batches: Iterator[GlobalBatch]) -> None:
        epoch = self.progress.position.epoch
        with self.bus.span(
            "epoch",
            lambda: EpochBegin(update=self.progress.update, epoch=epoch),
            lambda error: EpochEnd(
                update=self.progress.update, epoch=epoch, complete=self.progress.position.epoch > epoch
            ),
        ):
            while self.progress.position.epoch == epoch and not self._over():
                began = perf_counter()
                batch = self._again.popleft() if self._again else next(batches, None)
                if batch is None:
                    self._end_of_data()
                    continue
                if self._given_up and any(begin <= batch.position < end for begin, end in self._given_up):
                    self.settle()
                    self.progress = self.progress.without(batch)
                    continue
                self._one(batch, began=began)
                if self._rewinding is not None:
                    break
                if batch.ends_epoch:
                    self.settle()
                if self.progress.update % self.log_every_updates == 0:
                    self.settle()
                    self.actions.write()
                self.act()

    def _end_of_data(self) -> None:
        if self.progress.position.batch == 0 and self.progress.position.epoch == 0:
            raise DataError("the training data gave no global batch at all; look at its length and filters.")
        self._data_ended = True
        if self.updates is not None or self.progress.position.epoch < cast("int", self.epochs):
            update = self.progress.update
            wanted = f"{self.epochs} epochs" if self.updates is None else f"{self.updates} updates"
            message = (
                f"the data ended after {update} updates, before the {wanted} that were asked for: they can be iterated "
                f"only once, as a generator. Give an object whose `__iter__` begins anew, or ask for fewer."
            )
            self.actions.report(Incident(kind="data_ended", update=update, message=message))

    def _one(self, batch: GlobalBatch, *, began: float) -> None:
        number, data_s = self.progress.update + 1, perf_counter() - began
        self.failed = batch, number
        began += self.guard(batch)
        waited_s, skipped = self.execution.strategy.group.waited_s, 0
        if not self._remarks.said:
            self._remark(batch)
        self.hear(batch)
        with self.bus.span(
            "update",
            lambda: UpdateBegin(
                update=number,
                num_microbatches=batch.num_microbatches,
                data_s=data_s,
                task_data_s=_by_task(batch, "data_s"),
            ),
            lambda error: UpdateEnd(
                update=number,
                committed=error is None and self.progress.update >= number,
                num_samples=batch.num_samples - skipped,
                task_samples=_by_task(batch, "num_samples"),
            ),
        ):
            before, precision = self.progress, self.precision.state
            self.under_way = number
            try:
                outcome = self.update(batch, number)
            finally:
                self.under_way = 0
            skipped = outcome.skipped_samples
            self._ledger.append(Entry(batch=batch, before=before, precision=precision, outcome=outcome))
            self.progress = before.committed(batch, skipped_samples=skipped)
            self._positions.append((number, batch.following))
            self.precision.committed()
            self._count(skipped)
            # The device has not heard of an abort that only the host knows of, so it would apply what follows.
            known = isinstance(outcome.aborted, float) and outcome.aborted > 0
            if known or len(self._ledger) >= self.settle_every_updates:
                self.settle()
        self.failed = None
        if self.progress.update >= number:
            self.execution.strategy.after_update(number)
            self.update.begin()  # statistics that the ranks have averaged stay, whatever breaks off next
        self._busy_s += perf_counter() - began - (self.execution.strategy.group.waited_s - waited_s)
        self._busy_updates += 1

    def _remark(self, batch: GlobalBatch) -> None:
        execution = self.execution
        remarks = self._remarks(
            batch,
            data=self.data,
            ranks=execution.strategy.ranks,
            outside=self.update.trained.outside_names,
            rank=execution.group.rank if execution.in_stages else None,
            update=self.progress.update,
        )
        for incident in remarks:
            self.actions.report(incident)

    def hear(self, batch: GlobalBatch) -> None:
        """Report what went wrong on this rank while `batch` was fetched."""
        for fault in batch.faults:
            incident = Incident(
                kind="loader",
                update=self.progress.update + 1,
                message=fault.message,
                details={"skipped_samples": fault.num_skipped},
                rank=self.execution.group.rank,
                samples=tuple(fault.samples),
                traceback=fault.details,
            )
            self.actions.report(incident)

    def _count(self, skipped_samples: int) -> None:
        """Stop, on all ranks at the same update, a run that can't read too much of its data."""
        self._skipped_samples += skipped_samples
        if self._skipped_samples > self.max_skipped_samples:
            raise DataError(
                f"{self._skipped_samples} samples could not be read and were left out, more than the "
                f"{self.max_skipped_samples} of `max_skipped_samples`; the folder `incidents` of the run names them. "
                f"Correct the data, or raise `failures.max_skipped_samples`."
            )

    def act(self) -> None:
        """Evaluate, then save: what an evaluation asks for is done at the same update."""
        asks, group = self.asks, self.execution.group
        self.actions.poll()
        if self._rewinding is not None:
            return
        asks.agree(group)
        if asks.evaluate or asks.save:
            self.settle()
            if asks.evaluate:
                with asks.evaluating():
                    self.actions.evaluate()
                    asks.agree(group)
            if asks.save:
                with asks.saving():
                    self.actions.save()

    def settle(self) -> None:
        """Learn which dispatched updates were committed, and go back to the first that was not."""
        entries = self._ledger.copy()
        self._ledger.clear()
        place = first_aborted(entries)
        if place is not None:
            self._go_back(entries[place:])

    def _go_back(self, entries: list[Entry]) -> None:
        """Answer the abort of the first of `entries`, all of which were not applied."""
        first, number = entries[0], entries[0].before.update + 1
        self.storage.discard_from(number)
        self.asks.forget_actions()
        self.progress, self.precision.state = first.before, first.precision
        self.update.resume()
        incident, policy = self._aborts.incident(first, number)
        answer = policy(incident)
        if policy.note:
            incident = replace(incident, message=f"{incident.message} {policy.note}")
        if answer is Answer.STOP:
            self.failed = first.batch, number
            incident, error = self._aborts.ending(incident, first)
            self.actions.report(incident)
            raise error
        self.actions.report(incident)
        if answer in (Answer.REWIND, Answer.REWIND_PAST):
            self._positions.append((number, first.batch.following))
            self.rewind(incident, answer)
            return
        again = [entry.batch for entry in entries]
        if answer is Answer.SKIP:
            self.progress = first.before.without(again.pop(0))
        elif answer is Answer.DROP:
            again[0] = again[0].without(cast("list[str]", incident.details["tasks"]))
        elif incident.kind == "overflow":
            self._aborts.lower_scale()
        self._again.extendleft(reversed(again))


def _by_task(batch: GlobalBatch, count: Literal["data_s", "num_samples"]) -> dict[str, Any]:
    """A count of the batch's parts, summed by task; of unnamed ones the whole count says it already."""
    counts: dict[str, Any] = {}
    for part in batch.parts:
        if part.task:
            counts[part.task] = counts.get(part.task, 0) + getattr(part, count)
    return counts
