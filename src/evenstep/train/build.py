"""Builds engines from the arguments of `Engine` and `Trainer`, in one order.

`Parts` takes arguments; `Parts.build` moves, converts and shares the model.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstep import training_mode
from evenstep.arguments import choose
from evenstep.data import Data, GlobalBatch
from evenstep.errors import ArgumentError
from evenstep.events import Bus, Event, Incident, MicrobatchEvent
from evenstep.internals import local_tensor, unwrapped
from evenstep.keys import branch, key_below
from evenstep.lazy import load
from evenstep.optim.apply import build_apply
from evenstep.optim.ema import Average
from evenstep.optim.learning_rate import LearningRates
from evenstep.optim.optimizers import joined, parts_of, set_mode
from evenstep.optim.rounded import RoundedStepper
from evenstep.optim.schedules import LR_SCHEDULES, LrSchedule, plateaus_of
from evenstep.optim.stepper import MasterStepper, Stepper
from evenstep.options import Failures, Training
from evenstep.parallel import Group, Single, Strategy, device_of_rank, launched_group, strategy_named
from evenstep.parallel.buffers import is_norm
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.compiled import release
from evenstep.precision import PRECISIONS, FullPrecision, Precision
from evenstep.single_use import check_unused
from evenstep.tensors import device_here, make_current, named_parameters, parameters_in
from evenstep.train import blocks
from evenstep.train.agreement import check_shared
from evenstep.train.cut import SplitLimit
from evenstep.train.failures import Policies
from evenstep.train.forwards import build_teacher
from evenstep.train.loss_check import LossCheck
from evenstep.train.progress import Progress
from evenstep.train.randomness import Randomness, in_order, key_layers
from evenstep.train.state.optimizer_state import parameter_names
from evenstep.train.state.settings import plain, settings_of
from evenstep.train.tasks.metrics import build_storage
from evenstep.train.tasks.task import Task
from evenstep.train.tasks.tasks import attach_learned, attach_modules, named
from evenstep.train.tasks.weighting import Coefficients, Combine, Separate
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.execution import build_execution
from evenstep.train.update.microbatch import TrainContext, build_cast, build_transfer
from evenstep.train.update.outcome import PendingUpdate
from evenstep.train.update.update import Update

_PACKAGES = {"update": "evenstep.contrib.compiled_update"}  # packages that compute updates, by `Training.compile`


# --- arguments


def precision_of(given: Precision | str | None) -> Precision:
    """Precision for an object or a name."""
    if given is None:
        return FullPrecision()
    return choose("precision", given, PRECISIONS)() if isinstance(given, str) else given


def lr_schedule_of(given: Any) -> LrSchedule | None:
    """LR schedule for an object, a name, or a table of `kind` and arguments."""
    if given is None or isinstance(given, LrSchedule):
        return given
    if isinstance(given, str | Mapping):
        table: dict[str, Any] = {"kind": given} if isinstance(given, str) else dict(given)
        kind = table.pop("kind", "constant" if table.keys() <= {"warmup_updates"} else "")
        return choose("lr_schedule", str(kind), LR_SCHEDULES)(**table)
    kind = f"a torch scheduler ({type(given).__name__})" if isinstance(given, LRScheduler) else type(given).__name__
    raise ArgumentError(
        f"`lr_schedule` must be one of {', '.join(LR_SCHEDULES)}, a table such as {{'kind': 'cosine', "
        f"'warmup_updates': 100}}, or an `LrSchedule`, but is {kind}.",
        field="lr_schedule",
    )


def strategy_of(given: Strategy | str | None, device: str | torch.device, model: nn.Module) -> Strategy:
    """Strategy object for an object or name; None is one process."""
    if given is None:
        return Single()
    if not isinstance(given, str):
        return given
    if isinstance(model, PipelineModel) and model.mesh.world.ranks > 1:
        return strategy_named(given, model.mesh.data)
    return strategy_named(given, launched_group(device_of_rank(str(device))))


def _combine_of(given: Combine | str | None, tasks: Mapping[str, Task]) -> Combine | None:
    if isinstance(given, str):
        return load(choose("combine", given, load("evenstep.contrib.multitask:COMBINES")))()
    # a weight that comes late is divided by before the next task's gradient is added
    is_late = len(tasks) > 1 and any(one.late_weight for one in tasks.values())
    return Separate() if given is None and is_late else given


# --- parts


@final
class Parts:
    """Parts of an engine: objects of its arguments, and what `build` makes of them.

    Attributes:
        group: all ranks of the run.
        settings: of updates, as plain values.
        package: computes updates in place of `core`: a module with `check(parts)`, and `build(parts)` for `compute`.
        compute: computes and applies one update.
        reads_at_once: True if the host knows at once that it was applied.
        teacher: output of the average; None where no task asks for it.
        averaged_as: formats of the average of parameters that have another format, by name.

    Raises:
        ArgumentError: an argument that can't be, or that does not go with another.
        TaskError: a model that can't be trained.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        task: Task | Mapping[str, Task],
        optimizer: Optimizer | Sequence[Optimizer],
        strategy: Strategy | str | None,
        precision: Precision | str | None,
        lr_schedule: LrSchedule | str | Mapping[str, Any] | None,
        seed: int,
        device: str | torch.device,
        train: Training,
        failures: Failures = Failures(),
    ) -> None:
        self.model = model
        self.train = train
        self.seed = seed
        self.may_cut = failures.out_of_memory == "retry"
        self.policies = Policies(failures)
        self.optimizer = optimizer = joined(optimizer)
        self.tasks = tasks = named(task)
        self.precision = formats = precision_of(precision)
        self.strategy = sharing = strategy_of(strategy, device, model)
        self.group: Group = model.mesh.world if isinstance(model, PipelineModel) else sharing.data_group
        self.device = device_here(device_of_rank("auto") if device == "auto" else device)
        given = train.coefficients
        self.coefficients = factors = given if isinstance(given, Coefficients) else Coefficients(given)
        self.combine = combine = _combine_of(train.combine, tasks)
        attach_modules(model, tasks, {id(one) for one in parameters_in(optimizer)})
        for one in tasks.values():
            one.prepare(model)
        self.lr_schedule = schedule = lr_schedule_of(lr_schedule)
        self.storage = build_storage(tasks, self.device, train.clip_norm)
        self.linear_layers = blocks.choose_linear_layers(model, formats)
        self.recomputed = blocks.choose_modules(model, train.memory.checkpoint)
        self.settings = settings_of(train, factors, combine, formats, schedule) | sharing.settings
        self.package: Any = import_module(_PACKAGES[train.compile]) if train.compile in _PACKAGES else None
        if self.package is not None:
            self.package.check(self)
        check_unused(self.kept)

    @property
    def kept(self) -> dict[str, object]:
        """Objects with state, by their names in messages; they belong to one run."""
        by_name = {
            "coefficients": None if type(self.coefficients) is Coefficients else self.coefficients,
            "combine": self.combine,
            "lr_schedule": self.lr_schedule if plateaus_of(self.lr_schedule) else None,
            **self.policies.kept,
            **{f"task {name}".strip(): task for name, task in self.tasks.items() if task.uses_average},
        }
        return {f"`{name}`": one for name, one in by_name.items() if one is not None and vars(one)}

    def build(self, *, updates: int | None, bus: Bus, report: Callable[[Incident], None]) -> None:
        """Move, convert and share the model, and build what computes its updates.

        Args:
            updates: length of the run; None if that is not known.
        """
        model, optimizer, train, tasks, precision = self.model, self.optimizer, self.train, self.tasks, self.precision
        attach_learned(model, optimizer, tuple(tasks), self.coefficients, self.combine)
        strategy = self.strategy if precision.format is None else self.strategy.gathering(precision.format)
        make_current(self.device)
        model.to(self.device)
        names = parameter_names(model, optimizer)  # before the strategy divides them between ranks
        rounded = self._rounded(names)
        self.context = context = TrainContext(
            tasks=tasks,
            precision=precision,
            loss_scale=precision.build_loss_scale(),
            device=self.device,
            transfer=build_transfer(self.device),
            storage=self.storage,
            bus=bus,
            seed=self.seed,
            randomness=Randomness(self.device),
            cast_inputs=build_cast(precision.format),
            cast_outputs=build_cast(precision.output_format),
            coefficients=self.coefficients,
            cuts=SplitLimit(sums=train.check_loss),
            report=report,
        )
        bus.drawing = _drawing(context.randomness, branch(self.seed, "hooks"))
        self.coefficients.check(updates)
        learning_rates = LearningRates(optimizer, self.lr_schedule, updates)
        self._change_layers()
        self.group.go_on()  # after an earlier error of all ranks
        check_shared(model, strategy)
        self.execution = build_execution(model, strategy, optimizer, self.device)
        blocks.recompute(model, self.recomputed)
        self.stepper = self._stepper(rounded)  # rounds the parameters of the model
        self.averaged_as = self._averaged_as(rounded)
        # after the strategy has made replicas equal: the average begins as a copy of the parameters
        self.average = None if train.ema is None else Average(train.ema, unwrapped(model), self.averaged_as)
        settle = train.settle_every_updates
        stepped = {name for group in names for name in group}
        by_name = named_parameters(model)
        self.core = Update(
            model=model,
            parameters=[by_name[name] for name in in_order(unwrapped(model), by_name) if name in stepped],
            context=context,
            execution=self.execution,
            apply=build_apply(
                self.stepper,
                clip_norm=train.clip_norm,
                device=self.device,
                defer=None if settle is None else settle > 1,
            ),
            average=self.average,
            learning_rates=learning_rates,
            may_cut=self.may_cut,
            trained=TrainedParameters(model, optimizer, names, self.execution.reducers, precision),
            combine=self.combine,
        )
        compute: Any = self.core if self.package is None else self.package.build(self)
        self.compute: Callable[[GlobalBatch, Progress], PendingUpdate] = compute
        self.reads_at_once: bool = compute.reads_at_once
        self.teacher = build_teacher(context, model, self.average)
        pending = set(context.tasks) if train.check_loss else set[str]()
        self.check_loss = LossCheck(self.core, context, self.execution, pending)
        self.prepare()

    def described(
        self, data: Data, sets: Mapping[str, Data], config: Mapping[str, Any] | None, **length: int | None
    ) -> dict[str, Any]:
        """A run as plain values: model, tasks, optimizer, data, LR schedule, precision, ranks, seed, `config`.

        Args:
            sets: evaluation data by name.
            config: as given to `Checkpointing`.
            length: updates and epochs of the run.
        """
        parameters = list(self.model.parameters())
        tasks = {name: type(task).__name__ for name, task in self.tasks.items()}
        optimizers = [_optimizer(one) for one in parts_of(self.optimizer)]
        return {
            "config": plain(config),
            "model": {
                "kind": type(unwrapped(self.model)).__name__,
                "parameters": sum(one.numel() for one in parameters),
                "trained": sum(one.numel() for one in parameters if one.requires_grad),
            },
            "task": tasks.get("", tasks),
            "optimizer": optimizers[0] if len(optimizers) == 1 else {str(at): one for at, one in enumerate(optimizers)},
            **self.settings,
            "precision": self.precision.name,
            "data": _settings_of(data),
            "evaluations": {name: _settings_of(one) for name, one in sets.items()},
            "strategy": type(self.strategy).__name__,
            "ranks": self.group.ranks,
            "seed": self.seed,
            **length,
        }

    def prepare(self) -> None:
        """Put model, optimizer and normalisation layers into training mode."""
        training_mode.train(self.model)
        set_mode(self.optimizer, "train", self.execution.reducers.after_step)
        for layer in self.model.modules() if self.train.norm_statistics == "frozen" else ():
            if is_norm(layer) and getattr(layer, "running_mean", None) is not None:
                layer.eval()

    def stretch(self, updates: int | None) -> None:
        """Let schedules stretch over a run of so many updates; raises ArgumentError if one does not fit."""
        self.coefficients.check(updates)
        self.core.learning_rates.stretch(updates)

    def _change_layers(self) -> None:
        model, randomness = self.model, self.context.randomness
        if self.package is None:
            key_layers(model, randomness)
        release(model)
        blocks.recompute(model, {})  # the choice of an earlier engine must not be compiled
        if self.train.compile == "model":
            blocks.compile_model(model)
        blocks.convert_linear_layers(model, self.precision, self.linear_layers)

    def _rounded(self, names: Sequence[Sequence[str]]) -> list[str]:
        by_name, held = named_parameters(self.model), [name for group in names for name in group]
        rounded = self.precision.convert(self.model, {id(by_name[name]) for name in held})
        return [name for name in held if id(by_name[name]) in rounded]

    def _averaged_as(self, rounded: Sequence[str]) -> dict[str, torch.dtype]:
        format = self.precision.format
        if format is None:
            return {}
        by_name = named_parameters(self.model)
        # an average has the format that the model computes in, with every strategy
        return {name: format for name in rounded if by_name[name].dtype != format}

    def _stepper(self, rounded: Sequence[str]) -> Stepper:
        model, optimizer, precision = self.model, self.optimizer, self.precision
        if precision.format is None:
            return Stepper(optimizer)
        by_name = named_parameters(model)
        if precision.keeps_masters:  # shards are rounded when they are gathered
            own = {name: by_name[name] for name in rounded if local_tensor(by_name[name]) is by_name[name]}
            return MasterStepper(optimizer, own, precision.format)
        aliases = model.aliases if isinstance(model, PipelineModel) else {}
        names = {id(parameter): aliases.get(name, name) for name, parameter in by_name.items()}
        first_element = self.execution.reducers.layout.first_element
        return RoundedStepper(optimizer, names, seed=self.seed, first_element=first_element)


def _settings_of(data: Data) -> dict[str, Any]:
    fingerprint: Any = data.fingerprint()
    cut = fingerprint.pop("cut", {})  # whose keys users give beside the others
    return plain({**fingerprint, **cut})


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    groups = [
        {key: plain(value, 0) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    if len(groups) == 1:
        return {"kind": type(optimizer).__name__, **groups[0]}
    named = {str(group.get("name", at)): group for at, group in enumerate(groups)}
    return {"kind": type(optimizer).__name__, **named}


def _drawing(randomness: Randomness, root: int) -> Callable[[str, Event], AbstractContextManager[None]]:
    def drawing(place: str, event: Event) -> AbstractContextManager[None]:
        which = (event.microbatch,) if isinstance(event, MicrobatchEvent) else ()
        return randomness.keyed(key_below(root, place, event.update, *which))

    return drawing
