"""Builds the loop of a trainer, with its standard hooks and writers.

A folder brings the writers `console` and `jsonl` and six hooks, evaluations bring `Evaluate`. Given writers replace the
standard writers; a given hook replaces the standard hook of its class.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

from evenstep import events
from evenstep.arguments import choose
from evenstep.checkpoint import Mirror
from evenstep.data import Data, data_of
from evenstep.events.hooks.target import MetricTarget
from evenstep.optim.schedules import Plateau, plateaus_of
from evenstep.options import STANDARD_WRITERS, Checkpointing, Evaluation, Failures, Logging, check_names
from evenstep.train.build import Parts
from evenstep.train.checkpointer import Checkpointer
from evenstep.train.engine import Engine
from evenstep.train.evaluate import Evaluator
from evenstep.train.feed import Feed
from evenstep.train.loop import Loop
from evenstep.train.reporter import Reporter
from evenstep.train.requests import Requests
from evenstep.train.run_state import RunState, updates_of
from evenstep.train.state.run_folder import RunFolder
from evenstep.train.tasks.tasks import task_hooks


def evaluations_of(given: Any) -> dict[str, Data]:
    """The evaluation sets by name; a single one is called "valid"."""
    if given is None:
        return {}
    sets: Mapping[str, Any] = given if isinstance(given, Mapping) else {"valid": given}
    check_names("evaluation", sets, ("train", "perf", "progress"))
    return {name: data_of(data, f"evaluations[{name!r}]") for name, data in sets.items()}


def build_loop(
    trainer: Any,
    parts: Parts,
    *,
    data: Data,
    sets: dict[str, Data],
    hooks: Sequence[events.Hook | None],
    folder: Path | None,
    updates: int | None,
    epochs: int | None,
    evaluation: Evaluation,
    checkpoint: Checkpointing,
    failures: Failures,
    log: Logging,
) -> Loop:
    """The loop of `trainer`, with its components; `sets` are evaluation data by name."""
    # before the model is shared
    settings = parts.described(data, sets, checkpoint.config, updates=updates, epochs=epochs)
    group, every = parts.group, log.every_updates
    writers = writers_of(log.writers, folder=folder, every_updates=every)
    files = events.IncidentFiles(folder, makes_folder=group.rank == 0)
    reporter = Reporter(files=files, group=group, writers=writers, logs=log.writers is None and not writers)
    standard = _hooks(
        hooks, writers, folder=folder, every=every, evaluation=evaluation if sets else None, saved=checkpoint
    )
    followers = [*task_hooks(parts.tasks), *(Follow(plateau) for plateau in plateaus_of(parts.lr_schedule))]
    heard = [hook for hook in (*followers, *standard) if group.rank == 0 or not getattr(hook, "first_rank_only", False)]
    bus = reporter.bus = events.Bus(heard, trainer, on_error=failures.hook, report=reporter.report)
    for hook in bus.hooks:
        target = getattr(hook, "follows", None)
        if isinstance(target, MetricTarget):
            target.check(hook)
    planned = updates if epochs is None else updates_of(data, epochs, parts.seed)
    engine = Engine.of(parts, updates=planned, bus=bus, report=reporter.report)
    requests = Requests(pollers=_overriding(bus.hooks, "poll"))
    evaluator = Evaluator(parts, engine.ledger, sets=sets, writers=reporter.writers, requests=requests)
    state = RunState(
        engine=engine,
        data=data,
        epochs=epochs,
        evaluator=evaluator,
        requests=requests,
        config=dict(checkpoint.config or {}),
    )
    mirror = None if folder is None or checkpoint.mirror is None else Mirror(checkpoint.mirror, folder)
    run_folder = RunFolder(path=folder, group=group, report=reporter.report, mirror=mirror)
    known_at_once = parts.reads_at_once or data.positions != "all"
    return Loop(
        engine=engine,
        feed=Feed(
            data=data,
            reducers=engine.reducers,
            seed=parts.seed,
            pin_memory=parts.device.type == "cuda",
            max_skipped_samples=failures.max_skipped_samples,
            phases=engine.phases,
            requests=requests,
        ),
        evaluator=evaluator,
        checkpointer=Checkpointer(state=state, folder=run_folder, options=checkpoint, reporter=reporter),
        reporter=reporter,
        requests=requests,
        settings=settings,
        updates=updates,
        epochs=epochs,
        log_every_updates=every,
        settle_every_updates=1 if known_at_once else parts.train.settle_every_updates or every,
        settlers=_overriding(bus.hooks, "needs_settled"),
    )


def _overriding(hooks: Sequence[events.Hook], method: str) -> list[events.Hook]:
    return [hook for hook in hooks if getattr(type(hook), method) is not getattr(events.Hook, method)]


def writers_of(given: object, *, folder: Path | None, every_updates: int) -> list[events.Writer]:
    """Writers from objects and names; None gives the standard ones, or without a folder what suits the terminal."""
    if given is None:
        given = STANDARD_WRITERS if folder is not None else ("console",) if events.is_watched() else ()
    several = [given] if isinstance(given, str | events.Writer) else cast("Iterable[Any]", given)
    return [choose("writers", one, events.WRITERS)(every_updates) if isinstance(one, str) else one for one in several]


def _hooks(
    given: Sequence[events.Hook | None],
    writers: Sequence[events.Writer],
    *,
    folder: Path | None,
    every: int,
    evaluation: Evaluation | None,
    saved: Checkpointing,
) -> list[events.Hook | None]:
    own: list[Any] = [*given]
    before: list[events.Hook] = []
    after: list[events.Hook] = [writer for writer in writers if isinstance(writer, events.Hook)]
    if folder is not None:
        periods = {name: getattr(saved, name) for name in ("every_updates", "every_epochs", "every_minutes")}
        own = [*([] if saved.best is None else [saved.best]), *own]
        before.append(events.Timer(every_updates=every))
        if saved.keep_last != 0 and any(periods.values()):
            before.append(events.Save(**periods))
        after += [events.StopFile(), events.Status()]
    if evaluation is not None:
        epochs = evaluation.every_epochs or (1 if evaluation.every_updates is None else None)
        before.append(events.Evaluate(every_updates=evaluation.every_updates, every_epochs=epochs))
    kinds = {type(one) for one in own}
    return [hook for hook in (*before, *own, *after) if hook is None or hook in own or type(hook) not in kinds]


@final
class Follow(events.Hook):
    """Passes evaluations to the schedule `plateau`; raises HookError for one without its metric."""

    def __init__(self, plateau: Plateau) -> None:
        self._plateau = plateau
        self.follows = MetricTarget(metric=plateau.metric, mode=plateau.mode, min_delta=0.0)

    @property
    def name(self) -> str:
        return "Plateau"

    def after_evaluate(self, event: events.EvaluateEvent) -> None:
        value = self.follows.value(self, event)
        if value is not None:
            self._plateau.evaluated(value, update=event.update)
