"""Puts the parts of an engine together: what computes updates and evaluations of one model.

Here is decided, once, what the update then asks nothing about: how it is applied, how it is executed, and how often its
verdict is read. It runs nothing.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.events import Bus, Incident
from evenstep.names import named_parameters
from evenstep.optim.apply import HostApply, build_apply
from evenstep.optim.ema import Ema
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.modes import Modes
from evenstep.parallel import Strategy
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.compiled import release
from evenstep.train.channels_last import as_it_is
from evenstep.train.channels_last import channels_last as in_channels_last
from evenstep.train.compiled import CompiledModel, compile_model
from evenstep.train.context import TrainContext
from evenstep.train.execution import Execution, build_execution
from evenstep.train.failures import Retry
from evenstep.train.guard import Guard
from evenstep.train.layer_keys import in_order, key_layers
from evenstep.train.pipeline_state import PipelineStateSharding, build_pipeline_state_sharding
from evenstep.train.settings import settings_of
from evenstep.train.setup import Setup
from evenstep.train.split_limit import SplitLimit
from evenstep.train.state import TrainState, parameter_names, unwrapped
from evenstep.train.tasks import poison_of
from evenstep.train.trained import TrainedParameters
from evenstep.train.transfer import build_transfer
from evenstep.train.update import Update


class Parts(NamedTuple):
    """The parts of an engine.

    Args:
        optimizer: of its parameters, or of those that this rank steps.
        names: of the optimizer's groups' parameters, over all ranks.
        context: tasks, precision, device and recording.
        execution: how forwards and backwards are run, and on which ranks.
        core: computes and applies one update.
        guard: compares losses with those of halves, before the first update.
        cuts: how finely micro-batches are cut to fit into this rank's memory.
        ema: the average that follows the parameters, or None.
        modes: of the optimizer, which may have other parameters to evaluate than it trains.
        saved: the tensors of the state.
        portion: which part of the whole model this rank holds.
        reads_at_once: whether the host knows of each update at once whether it was applied.
        settings: what updates are made with, as plain values.
        compiled: what of the model is compiled; None: nothing.
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
    settings: dict[str, Any]
    compiled: CompiledModel | None


def build_parts(setup: Setup, *, updates: int | None, bus: Bus, report: Callable[[Incident], None]) -> Parts:
    """The parts of an engine. The model is moved to the device, and gets what is learned about its tasks.

    Args:
        updates: how many there will be; None if that is not known.
        bus: of the hooks that are told of updates.
        report: told of what went wrong and was mended.

    Raises:
        ArgumentError: parts that do not go together.
    """
    model, optimizer, train, tasks = setup.model, setup.optimizer, setup.train, setup.tasks
    device, precision, strategy = setup.device, setup.precision, setup.strategy
    settings = settings_of(train, tasks.coefficients, tasks.combine, precision, setup.lr_schedule)
    norms = tasks.attach(model, optimizer)
    model.to(device)
    if train.channels_last:
        cast("Any", model).to(memory_format=torch.channels_last)
    names = parameter_names(model, optimizer)  # before the strategy has divided them between ranks
    context = TrainContext(
        tasks=tasks.by_name,
        precision=precision,
        device=device,
        transfer=build_transfer(device),
        storage=setup.storage,
        bus=bus,
        seed=setup.seed,
        reorder=in_channels_last if train.channels_last else as_it_is,
        coefficients=tasks.coefficients,
        norms=norms,
        poison=poison_of(optimizer, setup.policies.non_finite, strategy),
    )
    context.coefficients.check(updates)
    learning_rates = LearningRates(optimizer, setup.lr_schedule, updates)
    settle = train.settle_every_updates
    apply = build_apply(
        optimizer, clip_norm=train.clip_norm, device=device, defer=None if settle is None else settle > 1
    )
    unkeyed = key_layers(model, context.randomness)
    release(model)
    compiled = compile_model(model, report, _rank_of(model, strategy)) if train.compile == "model" else None
    execution, cuts = build_execution(model, strategy, optimizer, device), SplitLimit()
    trained = TrainedParameters(model, optimizer, names, share=execution.reducers.share, check=precision.check_trained)
    core = Update(
        model=model,
        optimizer=optimizer,
        parameters=_stepped(model, names),
        context=context,
        execution=execution,
        apply=apply,
        ema=train.ema,
        learning_rates=learning_rates,
        cuts=cuts,
        on_out_of_memory=setup.policies.out_of_memory or Retry(),
        report=report,
        trained=trained,
        combine=tasks.combine,
        unkeyed=unkeyed,
        looks=() if compiled is None else (compiled.look,),
    )
    return Parts(
        model=model,
        optimizer=optimizer,
        names=names,
        context=context,
        execution=execution,
        core=core,
        guard=Guard(
            model=model,
            context=context,
            execution=execution,
            cuts=cuts,
            say=_say_of(execution),
            pending=set(context.tasks) if train.check_loss else set[str](),
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
            precision=precision,
        ),
        portion=build_pipeline_state_sharding(model, execution.trainer.peers.wire),
        reads_at_once=isinstance(apply, HostApply),
        settings=settings,
        compiled=compiled,
    )


def _rank_of(model: nn.Module, strategy: Strategy) -> int:
    return model.mesh.world.rank if isinstance(model, PipelineModel) else strategy.group.rank


def _stepped(model: nn.Module, names: Sequence[Sequence[str]]) -> list[nn.Parameter]:
    """What the optimizer steps, in an order that does not depend on its groups: norms are added up in it."""
    by_name, stepped = named_parameters(model), {name for group in names for name in group}
    return [by_name[name] for name in in_order(unwrapped(model), by_name) if name in stepped]


def _say_of(execution: Execution) -> Callable[[str], None]:
    """Says a sentence once for all ranks: on standard error, unless Python's `logging` is told otherwise."""
    return logging.getLogger("evenstep").warning if execution.group.rank == 0 else lambda text: None
