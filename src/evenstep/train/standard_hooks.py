"""Standard hooks and writers of a run.

    with a folder      writers `console` and `jsonl`; hooks Timer, MemoryUse, Save, StopFile, Status; a report
    with evaluations   the hook Evaluate
    with `console`     the writer as a hook, too; it prints starts, evaluations, checkpoints and incidents
    with neither       `console`, where a person watches (a terminal, a notebook); else only incidents, by `logging`

Whoever gives `writers` gets exactly those, and a hook that is given takes the place of the standard one of its class.
"""

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, final

from evenstep.arguments import choose
from evenstep.events import (
    WRITERS,
    Bus,
    Evaluate,
    EvaluateEvent,
    Event,
    Hook,
    Incident,
    IncidentFiles,
    MemoryUse,
    Record,
    Save,
    Status,
    StopFile,
    Timer,
    Writer,
    is_watched,
)
from evenstep.events.hooks.target import MetricTarget
from evenstep.lazy import load
from evenstep.optim.schedules import Plateau
from evenstep.options import STANDARD_WRITERS, Checkpointing, Evaluation, Logging
from evenstep.parallel import Group
from evenstep.train.reporter import Reporter


def build_reporter(
    trainer: Any,
    group: Group,
    hooks: object,
    followers: Sequence[Hook] = (),
    *,
    log: Logging,
    evaluation: Evaluation | None,
    checkpoint: Checkpointing,
    on_hook_error: Literal["stop", "continue"],
) -> Reporter:
    """The reporter of a run, with its hooks, writers and files.

    Args:
        evaluation: None if there is nothing to evaluate on.
        followers: hooks of the run's other parts.
    """
    folder, every_updates, first = trainer.folder, log.every_updates, group.rank == 0
    writers = writers_of(log.writers, folder=folder, every_updates=every_updates)
    reporter = Reporter(files=IncidentFiles(folder, makes_folder=first), group=group, writers=writers)
    standard = hooks_of(
        hooks, writers, folder=folder, every_updates=every_updates, evaluation=evaluation, checkpoint=checkpoint
    )
    every = [*followers, *standard]
    heard = [hook for hook in every if first or not getattr(hook, "first_rank_only", False)]
    reporter.bus = Bus(heard, trainer, on_error=on_hook_error, report=reporter.report)
    return reporter


@final
class _IncidentLog(Writer):
    def write(self, records: Sequence[Record]) -> None:
        pass

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, Incident) and event.kind != "failed":  # which is raised
            logging.getLogger("evenstep").warning(event.message)


def writers_of(given: object, *, folder: Path | None, every_updates: int) -> list[Writer]:
    """One or several writers, or their names in run files; None for the standard ones."""
    if given is None:
        given = STANDARD_WRITERS if folder is not None else ("console",) if is_watched() else (_IncidentLog(),)
    several = _several(given, (Writer, str))
    return [choose("writers", one, WRITERS)(every_updates) if isinstance(one, str) else one for one in several]


def hooks_of(
    given: object,
    writers: Sequence[Writer],
    *,
    folder: Path | None,
    every_updates: int,
    evaluation: Evaluation | None,
    checkpoint: Checkpointing,
) -> list[Hook | None]:
    """The hooks that were given, among the standard ones."""
    best = [] if folder is None or checkpoint.best is None else [checkpoint.best]
    own: list[Any] = [*best, *_several(given, (Hook,))]
    before: list[Hook] = []
    after: list[Hook] = [writer for writer in writers if isinstance(writer, Hook)]
    if folder is not None:
        before += [Timer(every_updates=every_updates), MemoryUse(every_updates=every_updates), *_saves(checkpoint)]
        after += [StopFile(), Status()]
    if evaluation is not None:
        before.append(_evaluate(evaluation))
    kinds = {type(one) for one in own}
    return [hook for hook in (*before, *own, *after) if hook is None or hook in own or type(hook) not in kinds]


def _evaluate(options: Evaluation) -> Hook:
    is_default = options.every_updates is None and options.every_epochs is None
    return Evaluate(
        every_updates=options.every_updates,
        every_epochs=1 if is_default else options.every_epochs,
        from_update=options.from_update,
    )


def _saves(checkpoint: Checkpointing) -> list[Hook]:
    periods = {name: getattr(checkpoint, name) for name in ("every_updates", "every_epochs", "every_minutes")}
    if checkpoint.keep_last == 0 or all(period is None for period in periods.values()):
        return []
    return [Save(**periods)]


def _several(given: object, kinds: tuple[type, ...]) -> list[Any]:
    if isinstance(given, kinds):
        return [given]
    if given is None:
        return []
    return list(cast("Iterable[Any]", given))


def write_page(folder: Path, update: int, report: Callable[[Incident], None]) -> None:
    """Write the report of the run in `folder`; that it could not be written is an incident, not the end of the run."""
    if not (folder / "status.json").exists():
        return  # it never began
    try:
        load("evenstep.tools.report:write_report")(folder)
    except Exception as error:  # noqa: BLE001 - not lost: it is an incident
        report(Incident(kind="report", update=update, message=str(error), traceback=traceback.format_exc()))


@final
class Follow(Hook):
    """Passes evaluations to the schedule `plateau`; raises HookError for one without its metric."""

    def __init__(self, plateau: Plateau) -> None:
        self._plateau = plateau
        self.follows = MetricTarget(metric=plateau.metric, mode=plateau.mode, min_delta=0.0)

    @property
    def name(self) -> str:
        return "Plateau"

    def after_evaluate(self, event: EvaluateEvent) -> None:
        value = self.follows.value(self, event)
        if value is not None:
            self._plateau.evaluated(value, update=event.update)
