"""Puts model and device, and then the update and the loop, together from plain arguments.

Here is decided, once, what the update then asks nothing about: how it is applied, how it is executed, and how often its
verdict is read. It runs nothing.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.errors import ArgumentError
from evenstep.events import Bus, Incident, IncidentFiles, Storage, Writers
from evenstep.names import named_parameters
from evenstep.optim.apply import HostApply, build_apply
from evenstep.optim.ema import Ema
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.modes import Modes
from evenstep.optim.schedules import LrSchedule
from evenstep.options import Training
from evenstep.parallel import Strategy
from evenstep.pipeline import Staged
from evenstep.precision import Precision
from evenstep.train.arguments import choose_device
from evenstep.train.channels_last import as_it_is
from evenstep.train.channels_last import channels_last as in_channels_last
from evenstep.train.checkpointer import Rewinding
from evenstep.train.combine import Combine
from evenstep.train.cuts import Cuts
from evenstep.train.evaluations import Evaluations
from evenstep.train.execution import Execution, build_execution
from evenstep.train.failures import FailurePolicy, Retry
from evenstep.train.given import Policies
from evenstep.train.guard import Guard
from evenstep.train.layer_keys import in_order, key_layers
from evenstep.train.loop import Actions, Loop
from evenstep.train.norms import Norms
from evenstep.train.passage import Way
from evenstep.train.reporter import Reports
from evenstep.train.saving import Saving
from evenstep.train.spikes import LossSpikes
from evenstep.train.state import unwrapped
from evenstep.train.tasks import Tasks, poison_of
from evenstep.train.trained import Trained
from evenstep.train.transfer import build_transfer
from evenstep.train.update import Update


def updates_of(data: Data, epochs: int, seed: int) -> int | None:
    """How many updates so many epochs are; None where the data do not know."""
    counts = [data.num_batches(epoch, seed=seed) for epoch in range(epochs)]
    return None if None in counts else sum(cast("list[int]", counts))


def place(model: nn.Module, device: str | torch.device, precision: Precision, *, channels_last: bool) -> torch.device:
    """Move the model to the device by this name, which is given back, and into its memory format.

    Raises:
        ArgumentError: there is no such device, or it can't compute in this precision.
    """
    chosen = choose_device(device)
    precision.check(chosen)
    model.to(chosen)
    if channels_last:
        cast("Any", model).to(memory_format=torch.channels_last)
    return chosen


def build_way(
    tasks: Tasks,
    precision: Precision,
    policy: FailurePolicy,
    strategy: Strategy,
    optimizer: Optimizer,
    device: torch.device,
    *,
    channels_last: bool,
    seed: int,
    storage: Storage,
    bus: Bus,
    norms: Norms,
) -> Way:
    """How each micro-batch goes through model and task; arguments are a trainer's, or of `Way`."""
    return Way(
        tasks=tasks.by_name,
        precision=precision,
        device=device,
        transfer=build_transfer(device),
        storage=storage,
        bus=bus,
        seed=seed,
        reorder=in_channels_last if channels_last else as_it_is,
        coefficients=tasks.coefficients,
        norms=norms,
        poison=poison_of(optimizer, policy, strategy),
    )


def build_loop(
    *,
    way: Way,
    model: nn.Module,
    names: list[list[str]],
    optimizer: Optimizer,
    data: Data,
    strategy: Strategy,
    combine: Combine | None,
    lr_schedule: LrSchedule | None,
    cuts: Cuts,
    actions: Actions,
    policies: Policies,
    updates: int | None,
    epochs: int | None,
    planned_updates: int | None,
    train: Training,
    log_every_updates: int,
    max_skipped_samples: int,
) -> Loop:
    """The loop and its update; arguments are a trainer's, or of `Loop` and `Update`.

    Args:
        names: of the optimizer's groups' parameters, from before the strategy has divided them between ranks.
        planned_updates: how many there will be, also where only the epochs were given; None if that is not known.

    Raises:
        ArgumentError: parts that do not go together.
    """
    way.coefficients.check(planned_updates)
    learning_rates = LearningRates(optimizer, lr_schedule, planned_updates)
    settle = train.settle_every_updates
    defer = None if settle is None else settle > 1
    apply = build_apply(optimizer, clip_norm=train.clip_norm, device=way.device, defer=defer)
    known_at_once = isinstance(apply, HostApply) or data.num_batches(0, seed=way.seed) is None
    _check_fit_memory(model, strategy, wanted=train.fit_memory)
    unkeyed = key_layers(model, way.randomness)
    execution = build_execution(model, strategy, optimizer, way.device)
    by_name, stepped = named_parameters(model), {name for group in names for name in group}
    update = Update(
        model=model,
        optimizer=optimizer,
        # in an order that doesn't depend on the optimizer's groups, in which norms are added up
        parameters=[by_name[name] for name in in_order(unwrapped(model), by_name) if name in stepped],
        way=way,
        execution=execution,
        apply=apply,
        ema=train.ema,
        learning_rates=learning_rates,
        cuts=cuts,
        on_out_of_memory=policies.out_of_memory or Retry(),
        report=actions.report,
        trained=Trained(model, optimizer, names, share=execution.strategy.share, check=way.precision.check_trained),
        combine=combine,
        unkeyed=unkeyed,
    )
    pending = set(way.tasks) if train.check_loss else set[str]()
    return Loop(
        update=update,
        guard=Guard(model=model, way=way, execution=execution, cuts=cuts, say=_say_of(execution), pending=pending),
        model=model,
        data=data,
        execution=execution,
        precision=way.precision,
        bus=way.bus,
        storage=way.storage,
        actions=actions,
        on_non_finite=policies.non_finite,
        updates=updates,
        epochs=epochs,
        seed=way.seed,
        pin_memory=way.device.type == "cuda",
        log_every_updates=log_every_updates,
        settle_every_updates=1 if known_at_once else settle or log_every_updates,
        max_skipped_samples=max_skipped_samples,
        # Where ranks gather a model together none can try alone: what fits is found by the first updates that don't.
        fit_memory=train.fit_memory and strategy.layout.divides != "elements",
    )


def build_surroundings(
    loop: Loop,
    *,
    way: Way,
    writers: Writers,
    saving: Saving,
    files: IncidentFiles,
    cuts: Cuts,
    spikes: LossSpikes | None,
    ema: Ema | None,
    optimizer: Optimizer,
    report: Callable[[Incident], None],
    load: Callable[[Path], Path],
) -> tuple[Reports, Evaluations, Rewinding]:
    """What goes on around the loop; arguments are a trainer's, or of the three."""
    group = saving.group
    reports = Reports(bus=way.bus, writers=writers, files=files, group=group, cuts=cuts, busy_s=loop.take_busy_s)
    modes = Modes(optimizer, loop.model.parameters(), loop.execution.strategy.after_step)
    evaluations = Evaluations(loop=loop, way=way, ema=ema, modes=modes, writers=writers, report=report)
    rewinding = Rewinding(loop=loop, load=load, saving=saving, writers=writers, cuts=cuts, spikes=spikes, report=report)
    return reports, evaluations, rewinding


def _say_of(execution: Execution) -> Callable[[str], None]:
    """Says a sentence once for all ranks: on standard error, unless Python's `logging` is told otherwise."""
    return logging.getLogger("evenstep").warning if execution.group.rank == 0 else lambda text: None


def _check_fit_memory(model: nn.Module, strategy: Strategy, *, wanted: bool) -> None:
    if wanted and (isinstance(model, Staged) or not strategy.cuts_alone):
        raise ArgumentError(
            "`fit_memory` begins with micro-batches as large as can be, which a model in stages must not (they would "
            "not overlap); give the micro-batch size as a number."
        )
