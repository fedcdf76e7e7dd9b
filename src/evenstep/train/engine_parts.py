"""Puts the parts of an engine together: what computes updates and evaluations of one model.

Here is decided, once, what the update then asks nothing about: how it is applied, how it is executed, and how often its
verdict is read. It runs nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from evenstep.events import Bus, Event, Incident, MicrobatchEvent
from evenstep.internals import unwrapped
from evenstep.keys import branch, key_below
from evenstep.optim.apply import Apply, build_apply
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.modes import Modes
from evenstep.optim.stepper import Stepper
from evenstep.parallel import Strategy
from evenstep.pipeline.compiled import release
from evenstep.precision import LossScale, Precision
from evenstep.tensors import make_current, named_parameters
from evenstep.train.checks import check_shared
from evenstep.train.compiled import compile_model
from evenstep.train.compute import Compute, ComputeParts
from evenstep.train.cut import SplitLimit
from evenstep.train.layer_keys import in_order, key_layers
from evenstep.train.linear_layers import convert_linear_layers
from evenstep.train.loss_check import LossCheck
from evenstep.train.number_formats import averaged_as, build_stepper
from evenstep.train.recompute import recompute
from evenstep.train.setup import Setup
from evenstep.train.state.pipeline_state import build_pipeline_state_sharding
from evenstep.train.state.settings import settings_of
from evenstep.train.state.train_state import TrainState, parameter_names
from evenstep.train.teacher import Teacher, build_teacher
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import TrainContext
from evenstep.train.update.execution import Execution, build_execution
from evenstep.train.update.transfer import build_cast, build_transfer, channels_last
from evenstep.train.update.update import Update


class Parts(NamedTuple):
    """The parts of an engine.

    Args:
        core: computes and applies one update, and looks into one again.
        compute: computes and applies one update: `core`, or a package in its place.
        teacher: gives what the model's average gives; None where no task asks for it.
        modes: of the optimizer, which may have other parameters to evaluate than it trains.
        saved: the tensors of the state, and which of them are trained.
        reads_at_once: whether the host knows of each update at once whether it was applied.
        settings: what updates are made with, as plain values.
    """

    context: TrainContext
    execution: Execution
    core: Update
    compute: Compute
    teacher: Teacher | None
    check_loss: LossCheck
    modes: Modes
    saved: TrainState
    reads_at_once: bool
    settings: dict[str, Any]


def build_parts(setup: Setup, *, updates: int | None, bus: Bus, report: Callable[[Incident], None]) -> Parts:
    """The parts of an engine. The model is moved to the device and gets learned coefficients of tasks.

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
    settings |= strategy.settings
    frozen_norms = tasks.attach(model, optimizer)
    if precision.format is not None:
        strategy = strategy.gathering(precision.format)
    _move(model, device, channels_last=train.channels_last)
    names = parameter_names(model, optimizer)  # before the strategy has divided them between ranks
    rounded = _rounded(precision, model, names)
    context = _context(setup, strategy, frozen_norms, bus, report)
    bus.drawing = _drawing(context)
    context.coefficients.check(updates)
    if train.ema is not None:
        train.ema.check(updates)
    learning_rates = LearningRates(optimizer, setup.lr_schedule, updates)
    if setup.compute is None:
        key_layers(model, context.randomness)
    release(model)
    recompute(model, {}, context.randomness)  # what an earlier engine has chosen is not to be compiled
    if train.compile == "model":
        compile_model(model)
    convert_linear_layers(model, precision, setup.linear_layers.here)
    setup.group.go_on()  # after an error of all ranks in what was built with this group before
    check_shared(model, strategy)
    execution = build_execution(model, strategy, optimizer, device)
    recompute(model, setup.recomputed.here, context.randomness)
    # After the strategy has made replicas equal: the average begins as a copy of the parameters.
    saved = _saved(setup, execution, names, rounded, context.loss_scale)
    teacher = build_teacher(tasks.by_name, model, saved.average)
    apply = _apply(setup, saved.stepper)
    core = Update(
        model=model,
        parameters=_stepped(model, names),
        context=context,
        execution=execution,
        apply=apply,
        average=saved.average,
        learning_rates=learning_rates,
        out_of_memory=setup.policies.out_of_memory,
        trained=saved.trained,
        combine=tasks.combine,
    )
    compute: Compute = core
    if setup.compute is not None:
        given = ComputeParts(
            setup=setup, core=core, context=context, execution=execution, hooks=bus.hooks, report=report
        )
        compute = setup.compute.build(given)
    return Parts(
        context=context,
        execution=execution,
        core=core,
        compute=compute,
        teacher=teacher,
        check_loss=LossCheck(
            model=model,
            context=context,
            execution=execution,
            rollback=core.rollback,
            pending=set(context.tasks) if train.check_loss else set(),
        ),
        modes=Modes(optimizer, model.parameters(), execution.reducers.after_step),
        saved=saved,
        reads_at_once=compute.reads_at_once,
        settings=settings,
    )


def _move(model: nn.Module, device: torch.device, *, channels_last: bool) -> None:
    make_current(device)
    model.to(device)
    if channels_last:
        cast("Any", model).to(memory_format=torch.channels_last)


def _context(
    setup: Setup,
    strategy: Strategy,
    frozen_norms: tuple[nn.Module, ...],
    bus: Bus,
    report: Callable[[Incident], None],
) -> TrainContext:
    precision, tasks = setup.precision, setup.tasks
    return TrainContext(
        tasks=tasks.by_name,
        precision=precision,
        loss_scale=precision.build_loss_scale(),
        device=setup.device,
        transfer=build_transfer(setup.device, precision.transfer_format),
        storage=setup.storage,
        bus=bus,
        seed=setup.seed,
        reorder=channels_last if setup.train.channels_last else None,
        cast_inputs=build_cast(precision.format),
        cast_outputs=build_cast(precision.output_format),
        coefficients=tasks.coefficients,
        frozen_norms=frozen_norms,
        cuts=SplitLimit(sums=setup.train.check_loss),
        report=report,
    )


def _drawing(context: TrainContext) -> Callable[[str, Event], AbstractContextManager[None]]:
    randomness, device, root = context.randomness, context.device, branch(context.seed, "hooks")

    def drawing(place: str, event: Event) -> AbstractContextManager[None]:
        which = (event.microbatch,) if isinstance(event, MicrobatchEvent) else ()
        return randomness.keyed(device, key_below(root, place, event.update, *which))

    return drawing


def _saved(
    setup: Setup, execution: Execution, names: list[list[str]], rounded: list[str], loss_scale: LossScale
) -> TrainState:
    model, optimizer, precision, ema = setup.model, setup.optimizer, setup.precision, setup.train.ema
    reducers = execution.reducers
    layout = reducers.layout
    sharding = build_pipeline_state_sharding(model, execution.trainer.peers.wire)
    stepper = build_stepper(
        precision, model=model, optimizer=optimizer, rounded=rounded, layout=layout, seed=setup.seed
    )
    return TrainState(
        model=unwrapped(model),
        optimizer=optimizer,
        names=names,
        layout=layout,
        ema=ema,
        loss_scale=loss_scale,
        stepper=stepper,
        averaged_as=averaged_as(precision, model, rounded),
        trained=TrainedParameters(model, optimizer, names, reducers, precision),
        sharding=sharding,
    )


def _apply(setup: Setup, stepper: Stepper) -> Apply:
    settle = setup.train.settle_every_updates
    return build_apply(
        stepper,
        clip_norm=setup.train.clip_norm,
        device=setup.device,
        defer=None if settle is None else settle > 1,
    )


def _rounded(precision: Precision, model: nn.Module, names: Sequence[Sequence[str]]) -> list[str]:
    by_name, held = named_parameters(model), [name for group in names for name in group]
    rounded = precision.convert(model, {id(by_name[name]) for name in held})
    return [name for name in held if id(by_name[name]) in rounded]


def _stepped(model: nn.Module, names: Sequence[Sequence[str]]) -> list[nn.Parameter]:
    by_name, stepped = named_parameters(model), {name for group in names for name in group}
    return [by_name[name] for name in in_order(unwrapped(model), by_name) if name in stepped]
