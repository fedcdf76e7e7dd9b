"""Puts the loop of a run together, from the engine and plain arguments: feed, evaluations, checkpoints, requests.

Here is decided, once, how often an update's verdict is read and whether micro-batches are fitted to the memory. It runs
nothing.
"""

from pathlib import Path
from typing import Any

from evenstep.checkpoint import Mirror
from evenstep.data import Data
from evenstep.options import Checkpointing, Failures, Logging, Training
from evenstep.train.engine import Engine
from evenstep.train.evaluations import Evaluations
from evenstep.train.failures.policies import Policies
from evenstep.train.feed import Feed
from evenstep.train.flops import peak_flops
from evenstep.train.loop import Loop
from evenstep.train.reporter import Reporter
from evenstep.train.requests import Requests
from evenstep.train.state.checkpointer import Checkpointer
from evenstep.train.state.run_folder import RunFolder
from evenstep.train.state.run_state import RunState


def build_loop(
    engine: Engine,
    *,
    data: Data,
    sets: dict[str, Data],
    policies: Policies,
    reporter: Reporter,
    folder: Path | None,
    config: dict[str, Any],
    updates: int | None,
    epochs: int | None,
    train: Training,
    checkpoint: Checkpointing,
    failures: Failures,
    log: Logging,
) -> Loop:
    """The loop and its components, each built of those before it; arguments are a trainer's, or of `Loop`.

    Args:
        sets: of data to evaluate on, by name.
        config: kept with checkpoints.
    """
    peak = None if log.peak_tflops is None else log.peak_tflops * 1e12
    settle = train.settle_every_updates or log.every_updates
    known_at_once = engine.parts.reads_at_once or not data.knows_length
    evaluator = Evaluations(engine=engine, sets=sets, reporter=reporter)
    state = RunState(engine=engine, data=data, epochs=epochs, evaluations=evaluator, reporter=reporter, config=config)
    mirror = None if folder is None or checkpoint.mirror is None else Mirror.of_run(checkpoint.mirror, folder)
    own = RunFolder(path=folder, group=engine.group, report=reporter.report, mirror=mirror)
    return Loop(
        engine=engine,
        feed=Feed(
            data=data,
            reducers=engine.reducers,
            seed=engine.seed,
            pin_memory=engine.parts.context.device.type == "cuda",
            max_skipped_samples=failures.max_skipped_samples,
        ),
        policies=policies,
        evaluator=evaluator,
        checkpointer=Checkpointer(state=state, folder=own, options=checkpoint, reporter=reporter),
        reporter=reporter,
        requests=Requests(),
        updates=updates,
        epochs=epochs,
        log_every_updates=log.every_updates,
        settle_every_updates=1 if known_at_once else settle,
        # Where ranks wait for each other in a pass none can try alone: the first updates find what fits.
        fits_memory=train.fit_memory and not engine.parts.execution.evaluates_together,
        counts_flops=log.flops,
        peak_flops=peak or peak_flops(engine.parts.context.device, engine.precision.name),
    )
