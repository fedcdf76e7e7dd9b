"""The trainer: the object that a user builds to train a model.

Modules that only a run needs are loaded when the first trainer is built: importing all public names is fast.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, final, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import require_whole, said, unknown_argument
from evenstep.data import Data, data_of
from evenstep.data.seeding import drawing_alone, undisturbed
from evenstep.errors import ArgumentError
from evenstep.events import Hook, TrainEvent
from evenstep.lazy import load
from evenstep.optim.schedules import LrSchedule
from evenstep.options import Checkpointing, Evaluation, Failures, Logging, Reset, Training, check_length
from evenstep.parallel import Group, Strategy
from evenstep.precision import Precision
from evenstep.single_use import mark_used
from evenstep.train.progress import Prediction, Progress, Result
from evenstep.train.state import Tree
from evenstep.train.state.settings import resets_of
from evenstep.train.tasks.task import Task

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from evenstep.train.engine import Engine
    from evenstep.train.evaluate import Evaluator
    from evenstep.train.loop import Loop


@final
class Trainer:
    """Trains a model: one update is one update, however it is cut.

    Args:
        model: any module. It is moved to the device.
        task: a `Task`, which says what a batch means; or a mapping of several tasks by name.
        optimizer: of the model's parameters, any of torch.optim except LBFGS, or a tuple of several; with `fused=True`
            scaling and clipping happen in its kernel.
        data: the training data: `MapData`, `StreamData`, `Mixture`, or a `DataLoader`, of which evenstep uses the
            dataset, whether it shuffles, and the batch size as the global batch size.
        updates: how many updates to commit; give this or `epochs`.
        epochs: how many epochs of the data to take.
        seed: of the data order, augmentation and dropout; any integer.
        device: "auto" takes the accelerator if there is one, else the CPU.
        strategy: how the ranks of a launcher such as torchrun share the model: a `Strategy`, "ddp", "zero1", "fsdp" or
            "auto". None is for a single process, and refused if a launcher has started several.
        precision: the number formats, as a `Precision` or by name, such as "bf16-mixed"; float32 by default.
        lr_schedule: multiplies each group's learning rate: an `LrSchedule`, its name, such as "cosine", or a table,
            `{"kind": "cosine", "warmup_updates": 100}`. None leaves the rates alone, so that hooks may set them.
        evaluations: a mapping of evaluation data by name, or the data of one evaluation, which is called "valid".
        hooks: called before and after each part of the run; see `Hook`. A `folder` brings Timer, StopFile and Status.
        folder: the run folder, for checkpoints, metrics and the report; None keeps nothing.
        resume: with a folder that holds a run: "never" lets `train` refuse it, unless `resume` is called; "auto" goes
            on from its newest checkpoint; "new" takes the next free folder, such as `runs/x-2` for `runs/x`.
        train: how an update is computed: clipping, an average of the parameters, several tasks, checks.
        evaluation: when the model is evaluated: by default after each epoch and at the end.
        checkpoint: when checkpoints are written into the folder, and which are kept.
        failures: policies for gradients that are not finite, too little memory, loss spikes, and more.
        log: how often metrics are written, and by which writers.

    Raises:
        ArgumentError: an argument is wrong; the message says what to write.
        TaskError: the model can't be trained.

    >>> class Line(Task):
    ...     loss = lambda self, output, batch: ((output - batch[1]) ** 2).sum()
    >>> from evenstep.data import MapData
    >>> model, pairs = nn.Linear(1, 1), [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(8)]
    >>> trainer = Trainer(model=model, task=Line(), optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
    ...                   data=MapData(pairs, global_batch_size=4), updates=200, device="cpu")
    >>> trainer.train().reason, round(model.weight.item(), 1)
    ('all 200 updates are done', 2.0)
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        task: Task | Mapping[str, Task],
        optimizer: Optimizer | Sequence[Optimizer],
        data: "Data | DataLoader[Any]",
        updates: int | None = None,
        epochs: int | None = None,
        seed: int = 42,
        device: str | torch.device = "auto",
        strategy: Strategy | str | None = None,
        precision: Precision | str | None = None,
        lr_schedule: LrSchedule | str | Mapping[str, Any] | None = None,
        evaluations: "Mapping[str, Data | DataLoader[Any]] | Data | DataLoader[Any] | None" = None,
        hooks: Sequence[Hook | None] | Hook = (),
        folder: Path | str | None = None,
        resume: Literal["never", "auto", "new"] = "never",
        train: Training = Training(),
        evaluation: Evaluation = Evaluation(),
        checkpoint: Checkpointing = Checkpointing(),
        failures: Failures = Failures(),
        log: Logging = Logging(),
        **unknown: Never,
    ) -> None:
        from evenstep.train.build import Parts
        from evenstep.train.build_loop import build_loop, evaluations_of
        from evenstep.train.checks import check_keeping, check_launched, check_model, check_parts

        for name in unknown:
            raise unknown_argument("Trainer", name, signature(Trainer.__init__).parameters)
        check_launched(strategy, model)
        check_model(model)
        check_length(updates, epochs)
        batches, sets = data_of(data, "data"), evaluations_of(evaluations)
        own = [hooks] if isinstance(hooks, Hook) else [*hooks]
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
            failures=failures,
        )
        averages = any(one.averages_ranks for one in own if isinstance(one, Hook))
        check_parts(parts, batches, sets, averages=averages)
        check_keeping(folder, parts.policies, checkpoint)
        self._group = parts.group
        self._is_training = self._has_trained = self._resumed = False
        self.model = model
        self.optimizer = parts.optimizer
        self.evaluations = sets
        self.storage = parts.storage
        self.folder = _folder_of(folder, resume, parts.group)
        self._loop = build_loop(
            self,
            parts,
            data=batches,
            sets=sets,
            hooks=own,
            folder=self.folder,
            updates=updates,
            epochs=epochs,
            evaluation=evaluation,
            checkpoint=checkpoint,
            failures=failures,
            log=log,
        )
        self._run = self._loop.run
        if self._group.can_change:
            self._run = load("evenstep.contrib.elastic.run:ElasticRun")(self._group, self._loop).run
        mark_used({**parts.kept, **self._loop.engine.bus.kept})
        if resume == "auto":
            self.resume()

    @property
    def updates(self) -> int | None:
        """Number of updates that the run commits; None if the data decide. It can be set between calls of `train`."""
        return self._loop.engine.parts.core.learning_rates.updates

    @updates.setter
    def updates(self, updates: int) -> None:
        loop = self._loop
        self._check_not_training("updates", "call `request_stop` to end it now")
        if loop.updates is None:
            raise ArgumentError("`updates` can't be set in a trainer with `epochs`.", field="updates")
        require_whole("updates", updates, at_least=max(self.progress.update, 1))
        loop.engine.parts.stretch(updates)
        loop.updates = updates

    @property
    def engine(self) -> "Engine":
        """The engine of the run, which has its phases, hooks (`bus`), ranks and parts."""
        return self._loop.engine

    @property
    def rank(self) -> int:
        """Number of this process in the run."""
        return self._loop.engine.group.rank

    @property
    def progress(self) -> Progress:
        """The counters of committed work."""
        return self._loop.engine.progress

    def log(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Add to a metric of this update, such as "train/entropy": Σ value · weight / Σ weight, over all ranks."""
        self.storage.put(name, value * weight, weight, update=self._loop.number or self.progress.update)

    def request_stop(self, reason: str, *, requeue: bool = False) -> None:
        """Stop at the end of this update, for a reason that the result and the logs will give.

        Args:
            requeue: whether the run is to be started again later, to go on from there (exit code 75).
        """
        self._loop.requests.request_stop(reason, requeue=requeue)

    def request_save(self) -> None:
        """Save at the end of this update."""
        self._loop.requests.save = True

    def request_evaluate(self) -> None:
        """Evaluate at the end of this update, before it is saved."""
        self._check_evaluates()
        self._loop.requests.evaluate = True

    def train(self) -> Result:
        """Train until all updates are done, then evaluate and save; or until something asks to stop, then save.

        Another call goes on from there. After Ctrl-C or SIGTERM it finishes the update, saves, and ends the program,
        unless the program has its own handlers for them. A second Ctrl-C ends the process at once.
        """
        from evenstep.train.ending import emergency_save

        loop, writers = self._loop, self._loop.reporter.writers
        end = Result()

        def ended(error: BaseException | None = None) -> TrainEvent:
            outcome = end.outcome if error is None else "failed"
            update, metrics = self.progress.update, self._latest()
            return replace(begin, update=update, outcome=outcome, reason=end.reason, error=error, metrics=metrics)

        with self._opened():
            config = loop.checkpointer.state.config
            begin = TrainEvent(update=self.progress.update, updates=self.updates, resumed=self._resumed, config=config)
            writers.event("train_begin", begin)
            loop.checkpointer.begin_run(loop.settings)
            with loop.engine.bus.span("train", lambda: begin, ended):
                try:
                    if loop.engine.parts.policies.rewinding and not loop.checkpointer.folder.newest_first():
                        loop.checkpointer.save()  # something to go back to
                    end = self._run()
                    writers.event("train_end", ended())
                except BaseException as raised:
                    error = self._group.explained(raised)
                    emergency_save(error, loop, end=lambda: writers.event("train_end", ended(error)))
                    if error is raised:
                        raise
                    raise error from raised
            loop.write_known()  # hooks may have put values when they heard of the end
            return replace(end, update=self.progress.update, metrics=self._latest())

    @contextmanager
    def _opened(self) -> Generator[None]:
        from evenstep.train.ending import handling_signals

        self._check_not_training("train", "`updates` says how far a run goes, and `request_stop` ends it earlier")
        loop, folder = self._loop, self._loop.checkpointer.folder
        loop.engine.bus.attach(self)
        self._is_training = True
        try:
            with ExitStack() as opened:
                if self._group.ranks == 1:  # ranks may be threads, as in tests, which have agreed on what each does
                    opened.enter_context(drawing_alone("train"))
                opened.enter_context(handling_signals(loop))
                self._group.go_on()
                loop.check_agreement()
                folder.claim()
                loop.engine.parts.prepare()
                opened.enter_context(folder.hold())
                opened.enter_context(loop.reporter.writers.opened(self.folder, self.progress.update))
                opened.enter_context(closing(loop.feed.data))
                opened.enter_context(closing(loop.evaluator))
                opened.enter_context(undisturbed(loop.engine.parts.device))
                opened.enter_context(torch.enable_grad())
                self._has_trained = True
                yield
        finally:
            self._is_training = False

    def _latest(self) -> dict[str, float]:
        return {name: record.value for name in self.storage.names() if (record := self.storage.latest(name))}

    @overload
    def evaluate(self, data: "Data | DataLoader[Any]") -> dict[str, float]: ...

    @overload
    def evaluate(self, data: str | None = None) -> dict[str, dict[str, float]]: ...

    def evaluate(self, data: "Data | DataLoader[Any] | str | None" = None) -> Any:
        """Metrics of the parameters (or their average, if there is one) as of the last committed update.

        Args:
            data: the name of an evaluation, None for all of them, or any data, whose metrics writers do not get.

        Returns:
            By evaluation and name, without prefix: `{"valid": {"loss": 0.3}}`; of other data by name: `{"loss": 0.3}`.
        """
        self._check_not_training("evaluate", "call `request_evaluate`, which does it at the end of the update")
        loop = self._loop
        loop.engine.bus.attach(self)
        if data is None or isinstance(data, str):
            self._check_evaluates(data)
            sets = self.evaluations if data is None else {data: self.evaluations[data]}
            with self._together(loop.evaluator), ExitStack() as opened:
                if self._has_trained and not loop.checkpointer.is_named:  # else writers would forget what comes later
                    opened.enter_context(loop.checkpointer.folder.hold())
                    opened.enter_context(loop.reporter.writers.opened(self.folder, self.progress.update))
                loop.write_known()
                return loop.evaluator(sets)
        batches = data_of(data, "data")
        with self._together(batches):
            return loop.evaluator.of(batches)

    def predict(self, data: "Data | DataLoader[Any]") -> list[Prediction]:
        """Predictions (`Task.predict`) for one epoch of `data`, in its order, by the parameters of `evaluate`.

        The data run forward only, on all ranks, without losses and weights; a shuffled set comes shuffled. The first
        rank gets the predictions, one per micro-batch.
        """
        engine = self.engine
        if engine.parts.core.rollback.is_unjudged or self._loop.evaluator.is_running or engine.ledger.num_pending:
            raise ArgumentError(
                f"`predict` was called before update {self.progress.update} or an evaluation had ended: call it in "
                f"`after_update` of a hook whose `needs_settled` is true, in `after_evaluate`, or after training."
            )
        batches = data_of(data, "data")
        with self._together(batches):
            return self._loop.evaluator.predict(batches)

    @contextmanager
    def _together(self, reader: "Data | Evaluator | None" = None) -> Generator[None]:
        if self._is_training:
            yield
            return
        with self._loop.engine.ledger.together(), nullcontext() if reader is None else closing(reader):
            yield

    def save(self) -> Path:
        """Write a checkpoint of the state as of the last committed update; gives its folder once it is published.

        Raises:
            ArgumentError: the trainer has no folder.
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        self._check_not_training("save", "call `request_save`, which does it at the end of the update")
        self._loop.write_known()
        return self._loop.checkpointer.save()

    def resume(
        self,
        source: Path | str = "auto",
        *,
        new_settings: bool = False,
        reset: Reset | Collection[Reset] = (),
    ) -> Path | None:
        """Load a checkpoint, so that `train` goes on from it.

        Args:
            source: a checkpoint, or a run folder, whose newest is taken; "auto" takes the newest valid one of this
                trainer's folder, and gives None if there is none.
            new_settings: this trainer's learning rates and other settings of updates may differ from the saved ones.
            reset: parts that are not loaded, only with a path: "optimizer", "lr_schedule" (which then stretches over
                the remaining updates), "metrics" and "data".

        Raises:
            CheckpointError: it is missing, damaged, of another run, or made with other settings. Nothing has changed.
        """
        self._check_not_training("resume")
        resets = resets_of(reset, source)
        checkpointer = self._loop.checkpointer
        if source == "auto":
            path = checkpointer.resume_newest(new_settings=new_settings)
        else:
            path = checkpointer.resume(Path(source).expanduser(), new_settings=new_settings, reset=resets)
        self._resumed |= path is not None
        return path

    def state_dict(self) -> Tree:
        """Everything that the run needs to go on exactly, as a tree; see `Engine.state_dict`."""
        with self._together():
            return self._loop.checkpointer.state.state_dict(whole=True)

    def load_state_dict(self, state: Tree) -> None:
        """Restore a state of `state_dict`. Differences, such as another learning rate, are reported as an incident."""
        self._check_not_training("load_state_dict")
        self._loop.checkpointer.load(state)
        self._resumed = True

    def _check_not_training(self, what: str, advice: str = "call it before `train`") -> None:
        if self._is_training:
            raise ArgumentError(f"`{what}` was called while the trainer trains; {advice}.", field=what)

    def _check_evaluates(self, name: str | None = None) -> None:
        if not self.evaluations or (name is not None and name not in self.evaluations):
            raise ArgumentError(
                f"this trainer has {', '.join(self.evaluations) or 'nothing'} to evaluate on: give it "
                f"`evaluations={{'{name or 'valid'}': MapData(dataset, global_batch_size=32, shuffle=False)}}`.",
                field="evaluations" if name is None else "data",
            )


def idle_loop(trainer: Trainer, what: str) -> "Loop":
    """The loop of a trainer; raises ArgumentError if it trains."""
    trainer._check_not_training(what)  # pyright: ignore[reportPrivateUsage]
    return trainer._loop  # pyright: ignore[reportPrivateUsage]


def _folder_of(given: Path | str | None, resume: str, group: Group) -> Path | None:
    if resume not in ("never", "auto", "new") or (given is None and resume != "never"):
        raise ArgumentError(
            f'`resume` must be "never", or with a `folder` "auto" or "new", but is {said(resume)}.', field="resume"
        )
    if given is None:
        return None
    folder = Path(given).expanduser()

    def first_free() -> Path:
        named = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
        return next(
            one for one in chain([folder], named) if not one.exists() or (one.is_dir() and not any(one.iterdir()))
        )

    return group.first_rank_does(first_free) if resume == "new" else folder
