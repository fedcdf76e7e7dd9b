"""Puts the parts of an engine together: what computes updates and evaluations of one model.

Here is decided, once, what the update then asks nothing about: how it is applied, how it is executed, and how often its
verdict is read. It runs nothing.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.events import Bus, Incident, Storage
from evenstep.names import named_parameters
from evenstep.optim.apply import HostApply, build_apply
from evenstep.optim.ema import Ema
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.modes import Modes
from evenstep.optim.schedules import LrSchedule
from evenstep.options import Training
from evenstep.parallel import Strategy
from evenstep.precision import Precision
from evenstep.train.arguments import choose_device
from evenstep.train.channels_last import as_it_is
from evenstep.train.channels_last import channels_last as in_channels_last
from evenstep.train.combine import Combine
from evenstep.train.context import TrainContext
from evenstep.train.execution import Execution, build_execution
from evenstep.train.failures import FailurePolicy, Retry
from evenstep.train.guard import Guard
from evenstep.train.layer_keys import in_order, key_layers
from evenstep.train.norms import Norms
from evenstep.train.pipeline_state import PipelineStateSharding, build_pipeline_state_sharding
from evenstep.train.split_limit import SplitLimit
from evenstep.train.state import TrainState, unwrapped
from evenstep.train.tasks import Tasks, poison_of
from evenstep.train.trained import Trained
from evenstep.train.transfer import build_transfer
from evenstep.train.update import Update


class Parts(NamedTuple):
    """The parts of an engine.

    Args:
        model: on its device.
        optimizer: of its parameters, or of those that this rank steps.
        names: of the optimizer's groups' parameters, over all ranks.
        way: tasks, precision, device and recording.
        execution: how forwards and backwards are run, and on which ranks.
        core: computes and applies one update.
        guard: compares losses with those of halves, before the first update.
        cuts: how finely micro-batches are cut to fit into this rank's memory.
        ema: the average that follows the parameters, or None.
        modes: of the optimizer, which may have other parameters to evaluate than it trains.
        saved: the tensors of the state.
        portion: which part of the whole model this rank holds.
        reads_at_once: whether the host knows of each update at once whether it was applied.
    """

    model: nn.Module
    optimizer: Optimizer
    names: list[list[str]]
    context: TrainContext
    execution: Execution
    core: Update
    guard: Guard
    cuts: SplitLimit
    ema: Ema | None
    modes: Modes
    saved: TrainState
    portion: PipelineStateSharding
    reads_at_once: bool


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


def build_context(
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
) -> TrainContext:
    """How each micro-batch goes through model and task; arguments are a trainer's, or of `TrainContext`."""
    return TrainContext(
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


def build_parts(
    *,
    context: TrainContext,
    model: nn.Module,
    names: list[list[str]],
    optimizer: Optimizer,
    strategy: Strategy,
    combine: Combine | None,
    lr_schedule: LrSchedule | None,
    train: Training,
    on_out_of_memory: FailurePolicy | None,
    report: Callable[[Incident], None],
    planned_updates: int | None,
) -> Parts:
    """The parts of an engine; arguments are a trainer's, or of `Parts` and `Update`.

    Args:
        names: of the optimizer's groups' parameters, from before the strategy has divided them between ranks.
        planned_updates: how many there will be; None if that is not known.

    Raises:
        ArgumentError: parts that do not go together.
    """
    context.coefficients.check(planned_updates)
    learning_rates = LearningRates(optimizer, lr_schedule, planned_updates)
    settle = train.settle_every_updates
    defer = None if settle is None else settle > 1
    apply = build_apply(optimizer, clip_norm=train.clip_norm, device=context.device, defer=defer)
    unkeyed = key_layers(model, context.randomness)
    execution, cuts = build_execution(model, strategy, optimizer, context.device), SplitLimit()
    by_name, stepped = named_parameters(model), {name for group in names for name in group}
    core = Update(
        model=model,
        optimizer=optimizer,
        # in an order that doesn't depend on the optimizer's groups, in which norms are added up
        parameters=[by_name[name] for name in in_order(unwrapped(model), by_name) if name in stepped],
        context=context,
        execution=execution,
        apply=apply,
        ema=train.ema,
        learning_rates=learning_rates,
        cuts=cuts,
        on_out_of_memory=on_out_of_memory or Retry(),
        report=report,
        trained=Trained(model, optimizer, names, share=execution.reducers.share, check=context.precision.check_trained),
        combine=combine,
        unkeyed=unkeyed,
    )
    pending = set(context.tasks) if train.check_loss else set[str]()
    return Parts(
        model=model,
        optimizer=optimizer,
        names=names,
        context=context,
        execution=execution,
        core=core,
        guard=Guard(
            model=model, context=context, execution=execution, cuts=cuts, say=_say_of(execution), pending=pending
        ),
        cuts=cuts,
        ema=train.ema,
        modes=Modes(optimizer, model.parameters(), execution.reducers.after_step),
        # After the strategy has made replicas equal: the average begins as a copy of the parameters.
        saved=TrainState(
            model=unwrapped(model),
            optimizer=optimizer,
            names=names,
            layout=execution.reducers.layout,
            ema=train.ema,
            precision=context.precision,
        ),
        portion=build_pipeline_state_sharding(model, execution.trainer.peers.wire),
        reads_at_once=isinstance(apply, HostApply),
    )


def _say_of(execution: Execution) -> Callable[[str], None]:
    """Says a sentence once for all ranks: on standard error, unless Python's `logging` is told otherwise."""
    return logging.getLogger("evenstep").warning if execution.group.rank == 0 else lambda text: None
