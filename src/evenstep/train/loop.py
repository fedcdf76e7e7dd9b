"""The loop of a run: take a global batch, make an update of it, write metrics, then evaluate, save or stop.

An update is settled once the host knows if it was committed: at once on a CPU; elsewhere every `settle_every_updates`.
A failure policy answers an aborted update: its batch is taken again or left out, or the run goes back (`Rewind`).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch

from evenstep.data import GlobalBatch, Position
from evenstep.errors import DataError, NonFiniteError
from evenstep.events import EpochEvent, Hook, Incident, Record
from evenstep.internals import unwrapped
from evenstep.tensors import named_parameters
from evenstep.train.agreement import check_same_on_all_ranks, check_ties
from evenstep.train.checkpointer import Checkpointer
from evenstep.train.engine import Engine
from evenstep.train.evaluate import Evaluator
from evenstep.train.failures import Answer
from evenstep.train.feed import Feed
from evenstep.train.progress import Result
from evenstep.train.reporter import Reporter, report_faults
from evenstep.train.requests import Requests, Rewind
from evenstep.train.state.settings import plain
from evenstep.train.update.outcome import Aborted
from evenstep.version import __version__

_OF_A_RANK = ("model", "ranks")  # of a description: stages have other parameters, and processes may come later


@final
@dataclass(slots=True, kw_only=True)
class Loop:
    """Makes updates until the run is over.

    Args:
        settings: description of the run as it was built, by `Parts.described`.
        settle_every_updates: how many updates may be dispatched before their verdicts are read.
        settlers: hooks that need some updates settled before they are called.
        number: of the update that is made now; 0 between updates.
        has_begun: evaluations were tried before the first update.
    """

    engine: Engine
    feed: Feed
    evaluator: Evaluator
    checkpointer: Checkpointer
    reporter: Reporter
    requests: Requests
    settings: Mapping[str, Any]
    updates: int | None
    epochs: int | None
    log_every_updates: int
    settle_every_updates: int
    settlers: Sequence[Hook] = ()
    number: int = 0
    has_begun: bool = False

    def run(self) -> Result:
        """Make updates from where the engine is until the run is over or stopped; then evaluate and save."""
        engine = self.engine
        while True:
            self.number = 0
            engine.ledger.begin()
            try:
                with self.feed.opened(engine.progress.position) as batches:
                    end = self.act() or self.ended()  # a resumed run may have an evaluation to make
                    while end is None:
                        epoch = engine.progress.position.epoch
                        with self._epoch_events(epoch):
                            end = self.requests.agree(engine.group) or self.ended()
                            for batch in batches if end is None else ():
                                self._update(batch)
                                end = self._after(batch)
                                if end is not None or engine.progress.position.epoch != epoch:
                                    break
                            self.settle()
                        self._check_data()
                        end = self.act() or end or self.ended()
                    self.write()
                return self._finish(end)
            except Rewind as rewind:
                self._go_back(rewind)

    def check_agreement(self) -> None:
        """Raise ReplicaError unless all ranks are about to train the same; all ranks call it together."""
        engine, parts = self.engine, self.engine.parts
        run = {name: value for name, value in self.settings.items() if name not in _OF_A_RANK} | {
            "evenstep": __version__,
            "torch": torch.__version__,
            "update": engine.progress.update,
            "updates": self.updates,
            "folder": "given" if self.checkpointer.enabled else "none in which anything is saved",
            "train": plain(parts.train),
            "log.every_updates": self.log_every_updates,
            "settle_every_updates": self.settle_every_updates,
        }
        check_same_on_all_ranks(engine.group, run)
        # Ranks that hold different stages of a model agree with those that hold the same.
        model, groups = unwrapped(engine.model), parts.core.trained.names
        flags = {name: one.requires_grad for name, one in named_parameters(model).items()}
        own = {"the parameters of the optimizer's groups": groups, "requires_grad": flags}
        check_same_on_all_ranks(engine.reducers.group, own)
        check_ties(model, groups)

    def planned_end(self) -> Result | None:
        """The end that the run has reached as far as updates were dispatched; None: it goes on."""
        progress = self.engine.progress
        if self.updates is not None and progress.update >= self.updates:
            return Result(f"all {self.updates} updates are done")
        if self.epochs is not None and progress.position.epoch >= self.epochs:
            return Result(f"all {self.epochs} epochs are done")
        return Result(f"the data ended after {progress.update} updates") if self.feed.ended else None

    def ended(self) -> Result | None:
        """Settle at a planned end; returns the end unless an update was aborted."""
        if self.planned_end() is not None:
            self.settle()
        return self.planned_end()

    def settle(self) -> None:
        """Read the verdicts of dispatched updates, and answer the first that was aborted; it may raise `Rewind`."""
        aborted = self.engine.ledger.settle()
        if aborted is not None:
            self._answer(aborted)

    def act(self) -> Result | None:
        """Evaluate and save as any rank has requested; gives the end if one has requested to stop."""
        requests, group = self.requests, self.engine.group
        self.checkpointer.poll()
        stop = requests.agree(group)
        if not (requests.evaluate or requests.save):
            return stop
        self.settle()
        self.write()
        stop = requests.agree(group)  # without the requests of aborted updates
        # the evaluation of the end comes before its checkpoint: a run that goes on from it would make it again
        saves_end = requests.save and stop is None and self.planned_end() is not None
        if requests.evaluate or (saves_end and self.evaluator.due):
            requests.evaluate = not self.evaluator.all()
            stop = requests.agree(group)
            if requests.save:
                self.write()  # values that hooks put after the evaluation
        if requests.save:
            with self.engine.phases.only("save"):
                self.checkpointer.begin()
            requests.save = False  # also a request that was made meanwhile
        return stop

    def abandon(self) -> None:
        """Roll back uncommitted updates after an error."""
        dispatched = self.engine.progress.update
        self.engine.ledger.abandon()
        if self.engine.progress.update != dispatched:
            self.requests.forget_actions()

    def write(self) -> None:
        """Write metrics of settled updates, and apply the policy for loss spikes; it may raise `Rewind`."""
        engine = self.engine
        engine.phases.lap("loop")
        records = self.write_known()
        engine.phases.lap("write")
        spike = engine.parts.policies.about_spikes(records, engine.storage)
        if spike is None:
            return
        incident, answer = spike
        self.reporter.report(incident)
        if answer is Answer.STOP:
            raise NonFiniteError(
                f"{incident.message} The parameters are those after update {engine.progress.update}; go on from a "
                f"checkpoint before the spike with a lower learning rate or clipped gradients, or let "
                f"`failures.loss_spike` be rewind_past, which leaves out the data that caused it."
            )
        if answer is not None and answer.rewinds:
            raise self._rewind(incident, answer)

    def write_known(self) -> list[Record]:
        return self.reporter.settle(self.engine.storage)

    def _epoch_events(self, epoch: int) -> AbstractContextManager[None]:
        engine = self.engine
        engine.group.at(engine.progress.update + 1)
        begin = EpochEvent(update=engine.progress.update, epoch=epoch)

        def end(error: BaseException | None) -> EpochEvent:
            is_complete = engine.progress.position.epoch > epoch
            return replace(begin, update=engine.progress.update, complete=is_complete)

        return engine.bus.span("epoch", lambda: begin, end)

    def _update(self, batch: GlobalBatch) -> None:
        engine, lap = self.engine, self.engine.phases.lap
        if self.feed.is_given_up(batch):
            self.settle()
            engine.ledger.skip(batch)
            return
        engine.parts.check_loss(batch)
        if not self.has_begun:
            self.has_begun = True
            self._report_first()
            self.evaluator.try_out()
        self.number = number = engine.progress.update + 1
        lap("loop")
        report_faults(self.reporter.report, batch, number, engine.group.rank)
        with engine.ledger.events(engine.bus, batch):
            lap("hooks")
            pending = engine.ledger.add(engine.parts.compute(batch, engine.progress))
            self.feed.used(number, batch)
            self.feed.count_skipped(pending.skipped_samples)
            many = self.engine.ledger.num_pending >= self.settle_every_updates
            if many or pending.is_known_aborted or any(hook.needs_settled(number) for hook in self.settlers):
                self.settle()
            lap("apply")  # or the rest of it, where the update is one graph
        self.number = 0
        if engine.progress.update < number and not engine.ledger.num_pending:
            engine.storage.discard_from(number)  # values that hooks put after it: it is made again
        lap("hooks")

    def _after(self, batch: GlobalBatch) -> Result | None:
        progress = self.engine.progress
        is_written = progress.update % self.log_every_updates == 0
        if is_written or batch.ends_epoch:
            self.settle()
        if is_written:
            self.write()
        if self.engine.progress.position.epoch != batch.position.epoch:
            return None  # evaluations and saves that are due come after the events of the epoch
        end = self.act() or self.ended()
        self.engine.group.at(self.engine.progress.update + 1)
        return end

    def _report_first(self) -> None:
        engine, update = self.engine, self.engine.progress.update
        if self.checkpointer.enabled and self.feed.data.positions == "epochs":
            message = (
                "the stream has no `state_dict`, so a resume begins its epoch again; give it `state_dict` and "
                "`load_state_dict`, as torchdata's `StatefulDataLoader` has them."
            )
            self.reporter.say("loader", update, message)
        outside = [*engine.parts.core.trained.outside]
        if outside:
            message = (
                f"{len(outside)} parameters get gradients but are not in the optimizer, first `{outside[0]}`: give "
                f"them to the optimizer, or set `requires_grad_(False)`."
            )
            rank = engine.group.rank if engine.parts.execution.in_stages else None
            self.reporter.say("not_in_optimizer", update, message, rank=rank, tensors=tuple(outside[:20]))

    def _check_data(self) -> None:
        progress = self.engine.progress
        if not self.feed.ended:
            return
        if progress.position == Position():
            raise DataError("the training data gave no global batch at all; look at its length and filters.")
        if self.updates is not None or progress.position.epoch < cast("int", self.epochs):
            wanted = f"{self.epochs} epochs" if self.updates is None else f"{self.updates} updates"
            message = (
                f"the data ended after {progress.update} updates, before the {wanted} that were asked for: give data "
                f"that can be iterated again, or ask for fewer."
            )
            self.reporter.say("data_ended", progress.update, message)

    def _answer(self, aborted: Aborted) -> None:
        self.requests.forget_actions()
        batch = aborted.pending.batch
        answer = self.engine.parts.policies.about_abort(aborted.incident)
        if answer is Answer.STOP:
            incident, error = self.engine.ledger.explain(aborted)
            self.reporter.report(incident)
            raise error
        self.reporter.report(aborted.incident)
        if answer.rewinds:
            self.feed.used(aborted.pending.number, batch)
            raise self._rewind(aborted.incident, answer)
        again = [batch, *aborted.since]
        if answer is Answer.SKIP:
            self.engine.ledger.skip(again.pop(0))
        self.feed.take_again(again)

    def _rewind(self, incident: Incident, answer: Answer) -> Rewind:
        past = None
        if answer is Answer.REWIND_PAST:
            past = self.feed.end_of(incident.update) or self.engine.progress.position
        return Rewind(incident.message, update=incident.update, past=past)

    def _go_back(self, rewind: Rewind) -> None:
        if hasattr(rewind, "__notes__"):  # a hook failed at the same time, and its error is a note
            raise rewind
        self.engine.storage.discard_from(self.engine.progress.update + 1)
        self.requests.forget_actions()
        self.checkpointer.go_back(rewind.update, str(rewind))
        if self.engine.parts.policies.spikes is not None:
            self.engine.parts.policies.spikes.in_spike = False
        if rewind.past is not None:
            self.feed.give_up(self.engine.progress.position, rewind.past)

    def _finish(self, end: Result) -> Result:
        requests, checkpointer = self.requests, self.checkpointer
        evaluates = end.outcome == "done" and bool(self.evaluator.due)
        if evaluates and not self.evaluator.all():
            requests.evaluate = True  # it is made when the run goes on
            end = requests.agree(self.engine.group) or end
        saves, requests.save = requests.save or evaluates, False  # also by hooks that have heard of the evaluation
        checkpointer.settle()
        if checkpointer.enabled and (saves or checkpointer.saved_at != self.engine.progress.update):
            self.write_known()
            checkpointer.save()
        return end
