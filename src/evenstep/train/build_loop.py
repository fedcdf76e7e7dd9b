"""Builds the loop of a run: reporter, engine, feed, evaluations, checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.checkpoint import Mirror
from evenstep.data import Data, data_of
from evenstep.events import Hook
from evenstep.optim.schedules import plateaus_of
from evenstep.options import Checkpointing, Evaluation, Failures, Logging, check_evaluation_names
from evenstep.train.build import Setup
from evenstep.train.checkpointer import Checkpointer
from evenstep.train.engine import Engine
from evenstep.train.evaluate import Evaluations
from evenstep.train.feed import Feed
from evenstep.train.loop import Loop
from evenstep.train.requests import Requests
from evenstep.train.run_state import RunState, updates_of
from evenstep.train.standard_hooks import Follow, build_reporter
from evenstep.train.state.run_folder import RunFolder
from evenstep.train.tasks.now import task_hooks


def evaluations_of(given: Any) -> dict[str, Data]:
    """The evaluation sets by name; a single one is called "valid".

    Raises:
        ArgumentError: no data, or a name that is taken.
    """
    if given is None:
        return {}
    sets: Mapping[str, Any] = given if isinstance(given, Mapping) else {"valid": given}
    check_evaluation_names(sets)
    return {name: data_of(data, f"evaluations[{name!r}]") for name, data in sets.items()}


def build_loop(
    trainer: Any,
    setup: Setup,
    *,
    data: Data,
    sets: dict[str, Data],
    hooks: object,
    updates: int | None,
    epochs: int | None,
    evaluation: Evaluation,
    checkpoint: Checkpointing,
    failures: Failures,
    log: Logging,
) -> Loop:
    """The loop and its components, each built of those before it; other arguments are the trainer's.

    Args:
        trainer: which its hooks see.
        sets: of data to evaluate on, by name.
    """
    followers = [*task_hooks(setup.tasks.by_name), *(Follow(plateau) for plateau in plateaus_of(setup.lr_schedule))]
    reporter = build_reporter(
        trainer,
        setup.group,
        hooks,
        followers,
        log=log,
        evaluation=evaluation if sets else None,
        checkpoint=checkpoint,
        on_hook_error=failures.hook,
    )
    planned = updates if epochs is None else updates_of(data, epochs, setup.seed)
    engine = Engine.of(setup, updates=planned, bus=reporter.bus, report=reporter.report)
    folder, config, train = trainer.folder, dict(checkpoint.config or {}), setup.train
    settle = train.settle_every_updates or log.every_updates
    known_at_once = engine.parts.compute.reads_at_once or (data.state is not None and data.state.positions != "all")
    requests = Requests(pollers=_overriding(reporter.bus.hooks, "poll"))
    evaluator = Evaluations(
        evaluator=engine.evaluator,
        ledger=engine.ledger,
        phases=engine.phases,
        sets=sets,
        reporter=reporter,
        requests=requests,
    )
    state = RunState(
        engine=engine,
        data=data,
        epochs=epochs,
        evaluations=evaluator,
        requests=requests,
        reporter=reporter,
        config=config,
    )
    mirror = None if folder is None or checkpoint.mirror is None else Mirror(checkpoint.mirror, folder)
    own = RunFolder(path=folder, group=engine.group, report=reporter.report, mirror=mirror)
    return Loop(
        engine=engine,
        feed=Feed(
            data=data,
            reducers=engine.reducers,
            seed=setup.seed,
            pin_memory=engine.parts.context.device.type == "cuda",
            max_skipped_samples=failures.max_skipped_samples,
            phases=engine.phases,
            requests=requests,
        ),
        policies=setup.policies,
        evaluator=evaluator,
        checkpointer=Checkpointer(state=state, folder=own, options=checkpoint, reporter=reporter),
        reporter=reporter,
        requests=requests,
        updates=updates,
        epochs=epochs,
        log_every_updates=log.every_updates,
        settle_every_updates=1 if known_at_once else settle,
        settlers=_overriding(reporter.bus.hooks, "needs_settled"),
    )


def _overriding(hooks: Sequence[Hook], method: str) -> list[Hook]:
    return [hook for hook in hooks if getattr(type(hook), method) is not getattr(Hook, method)]
