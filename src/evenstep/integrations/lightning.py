"""A `LightningModule` as it is: the arguments of `Trainer` and `Engine` made of one. Lightning is not imported."""

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple, NotRequired, TypeAlias, TypedDict, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.errors import ArgumentError, TaskError, clause
from evenstep.internals import say_stepped, share_contents
from evenstep.optim.schedules import LrSchedule, Need
from evenstep.train.tasks.metrics import LaterMetrics
from evenstep.train.tasks.task import Loss, Task, default_weight

__all__ = ["LightningParts", "parts"]

# Beginnings of the names of hooks, and of those that training does not call or `parts` does.
_HOOKS = (
    *("on_", "configure_", "optimizer_", "lr_scheduler_", "transfer_", "backward", "teardown"),
    *("get_extra_state", "set_extra_state"),
)
_NOT_OF_TRAINING = ("configure_optimizers", "configure_model", "on_test_", "on_predict_")


class _Seen(NamedTuple):
    """A metric of torchmetrics that was logged, and the arguments of its update in this step."""

    metric: Any
    values: dict[str, Any]


_Logged: TypeAlias = "list[tuple[Tensor | float | _Seen, float | None]]"
"""Values that a step has logged under one name, each with the number of samples given with it."""


class LightningParts(TypedDict):
    """Arguments of `Trainer` and `Engine`; `lr_schedule` if the module has a scheduler."""

    model: nn.Module
    task: Task
    optimizer: Optimizer
    lr_schedule: NotRequired[LrSchedule]


def parts(
    module: nn.Module,
    *,
    updates: int | None = None,
    count: Callable[[Any], float | Tensor] | None = None,
    without: Collection[str] = (),
) -> LightningParts:
    """Model, task, optimizer and LR schedule of a `LightningModule`.

    For micro-batches m of w_m units with means l_m, an update takes g = Σ w_m ∇l_m / Σ w_m; Lightning: 1/M · Σ ∇l_m.

    Args:
        module: its parameters are trained in place, under their own names.
        updates: value of `self.trainer.estimated_stepping_batches` in `configure_optimizers`.
        count: number of units that the mean of a batch is over, on the CPU; its number of samples by default.
        without: hooks that the module overrides and this engine does not call, which it can do without.

    Raises:
        ArgumentError: it is no `LightningModule`, optimizes by itself, or overrides hooks that are not called.
    """
    name = type(module).__name__
    bases = [one for one in type(module).__mro__ if one.__name__ == "LightningModule"]
    if not bases:
        raise ArgumentError(f"`module` must be a LightningModule, but is a {name}.", field="module")
    lightning: Any = module
    if not lightning.automatic_optimization:
        raise ArgumentError(
            f"`{name}` makes its updates itself (`automatic_optimization = False`); write its loop with "
            f"`evenstep.Engine`.",
            field="automatic_optimization",
        )
    _check_hooks(module, bases[-1], without)
    trainer = _TrainerStandIn(name, updates)
    lightning.trainer = trainer
    lightning.setup("fit")
    lightning.configure_model()
    optimizer, schedule = _optimizer_and_schedule(lightning)
    step: Any = getattr(module, "validation_step", None)
    validates = step is not None and getattr(step, "__func__", step) is not getattr(bases[-1], "validation_step", None)
    task = type(name, (_StepTask,), {})(lightning, trainer, count, validates)  # messages name a task by its class
    made = LightningParts(model=_Steps(lightning), task=task, optimizer=optimizer)
    return made if schedule is None else {**made, "lr_schedule": schedule}


def _check_hooks(module: nn.Module, base: type, without: Collection[str]) -> None:
    hooks = [name for name in dir(base) if name.startswith(_HOOKS) and not name.startswith(_NOT_OF_TRAINING)]
    own = [name for name in hooks if name in vars(module) or getattr(type(module), name) is not getattr(base, name)]
    lost = [name for name in own if name not in without and callable(getattr(module, name))]
    if lost:
        raise ArgumentError(
            f"`{type(module).__name__}` overrides {', '.join(f'`{name}`' for name in lost)}, which this engine does "
            f"not call; do it in the steps or in an `evenstep.Hook`, then write `without={lost!r}`.",
            field="without",
        )


@final
class _TrainerStandIn:
    """Lightning's trainer for a module: it gives the numbers of the run, and refuses all else."""

    def __init__(self, name: str, updates: int | None) -> None:
        self._name = name
        self._updates = updates
        self.task: Task | None = None

    @property
    def global_step(self) -> int:
        return 0 if self.task is None else self.task.now.update - self.task.now.is_training

    @property
    def estimated_stepping_batches(self) -> int:
        if self._updates is None:
            raise ArgumentError(
                f"`{self._name}` asks `self.trainer.estimated_stepping_batches`; give the number, "
                f"`parts(module, updates=…)`.",
                field="updates",
            )
        return self._updates

    max_steps = estimated_stepping_batches

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("__"):
            raise AttributeError(asked)
        raise TaskError(
            f"`{self._name}` asks `{asked}` of Lightning's trainer, which does not run here; do it in an "
            f"`evenstep.Hook`, and log in the module's own steps.",
            field=asked,
        )


@final
class _Log:
    """Takes the calls of `self.log` in one step."""

    def __init__(self, updates: Mapping[int, list[dict[str, Any]]]) -> None:
        self._updates = updates
        self.logged: dict[str, _Logged] = {}

    def __call__(self, name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
        if isinstance(value, nn.Module):
            calls = self._updates.get(id(value), [])
            if len(calls) != 1:
                raise TaskError(
                    f"`{name}` logs a {type(value).__name__} that this step has updated {len(calls)} times; update "
                    f"it once in each step, a `MetricCollection` with `compute_groups=False`.",
                    field=name,
                )
            given: Any = _Seen(value, calls[0])
        else:
            given = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        self.logged.setdefault(name, []).append((given, batch_size))


@contextmanager
def _recorded(metrics: Sequence[Any]) -> Generator[dict[int, list[dict[str, Any]]]]:
    """Arguments of the updates of metrics inside the `with`, by the metric's id; their states are empty after it."""
    calls: dict[int, list[dict[str, Any]]] = {id(metric): [] for metric in metrics}
    before = [(metric, metric.__dict__.get("update")) for metric in metrics]

    def recording(metric: Any, act: Callable[..., Any], own_update: Any) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            bound = signature(type(metric).update).bind(metric, *args, **kwargs).arguments
            calls[id(metric)].append(dict(list(bound.items())[1:]))
            recorder = metric.__dict__.pop("update")
            metric.__dict__["update"] = own_update  # which a forward calls, once or twice
            try:
                return act(*args, **kwargs)
            finally:
                metric.__dict__["update"] = recorder

        return record

    for metric, update in before:
        metric.__dict__["update"] = recording(metric, update, update)
        metric.__dict__["forward"] = recording(metric, metric.forward, update)
    try:
        yield calls
    finally:
        for metric, update in before:
            metric.__dict__["update"] = update
            del metric.__dict__["forward"]
            metric.reset()


@final
class _Steps(nn.Module):
    """The module with its steps as the forward; it shares the contents of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        share_contents(self, module)
        self.__dict__["lightning"] = module  # not as a child: its parameters are here already
        self.training = module.training

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training" and "lightning" in self.__dict__:
            self.__dict__["lightning"].training = value

    def train(self, mode: bool = True) -> "_Steps":
        self.__dict__["lightning"].train(mode)  # it may keep some of its layers as they are
        self.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> "_Steps":
        self.__dict__["lightning"].to(*args, **kwargs)  # it notes the device for `self.device`
        return self

    def forward(self, batch: Any, step: str) -> tuple[Any, dict[str, _Logged]]:
        module = self.__dict__["lightning"]
        metrics = [part for part in module.modules() if hasattr(part, "metric_state")]
        with _recorded(metrics) as updates:
            module.__dict__["log"] = log = _Log(updates)
            try:
                given = getattr(module, step)(batch, *[None] * _takes(module, step))
            finally:
                del module.__dict__["log"]
        return given, log.logged


def _takes(module: nn.Module, step: str) -> int:
    """Count of required arguments of a step beside its batch; they depend on how the global batch was cut."""
    parameters = list(signature(getattr(module, step)).parameters.values())[1:]
    return sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


class _StepTask(Task):
    def __init__(
        self,
        module: Any,
        trainer: _TrainerStandIn,
        count: Callable[[Any], float | Tensor] | None,
        validates: bool,
    ) -> None:
        self._name = type(module).__name__
        self._count = count
        self._validates = validates
        self.metrics = self._later = LaterMetrics()
        trainer.task = self

    def inputs(self, batch: Any) -> Any:
        return batch, self._step()

    def weight(self, batch: Any) -> float | Tensor:
        return default_weight(self, batch) if self._count is None else self._count(batch)

    def loss(self, output: Any, batch: Any) -> Loss:
        given, logged = output
        samples = self.weight(batch)
        numbers, seen = _split(logged)
        for name, (metric, _) in seen.items():
            self._later.add(name, metric)
        # the engine itself has a metric `loss`
        metrics = {name: _pair(own, samples) for name, own in numbers.items() if name != "loss"}
        observed = {name: values for name, (_, values) in seen.items()}
        return Loss.of_mean(self._mean(given, numbers, samples), samples, metrics=metrics, observed=observed)

    def predict(self, output: Any, batch: Any) -> Any:
        raise TaskError(
            f"predictions of `{self._name}` come from the module itself, not from its step; call the module."
        )

    def _step(self) -> str:
        return "validation_step" if self._validates and self.now.is_evaluating else "training_step"

    def _mean(self, given: Any, logged: Mapping[str, _Logged], samples: float | Tensor) -> Tensor:
        mean = cast("Mapping[str, Any]", given).get("loss") if isinstance(given, Mapping) else given
        if isinstance(mean, Tensor) and mean.numel() == 1:
            return mean.reshape(())
        step = self._step()
        losses = [name for name in logged if name.endswith("loss")]
        if step == "training_step" or len(losses) != 1:
            raise TaskError(
                f"`{self._name}.{step}` must return the loss, one number, but gave a {type(mean).__name__}.", field=step
            )
        values = logged[losses[0]]
        total, size = _pair(values, samples)
        mean = cast("Any", values[0][0]) if len(values) == 1 else total / size
        return torch.as_tensor(mean, dtype=None if isinstance(mean, Tensor) else torch.float64)


def _split(logged: Mapping[str, _Logged]) -> tuple[dict[str, _Logged], dict[str, _Seen]]:
    """Numbers and metrics of torchmetrics among the logged values."""
    seen = {name: own[-1][0] for name, own in logged.items() if isinstance(own[-1][0], _Seen)}
    return {name: own for name, own in logged.items() if name not in seen}, seen


def _pair(logged: _Logged, samples: float | Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Sum and weight of the numbers that were logged under one name."""
    sizes = [samples if size is None else size for _, size in logged]
    return sum(_wide(value) * size for (value, _), size in zip(logged, sizes, strict=True)), sum(sizes)


def _wide(number: Any) -> Any:
    if not isinstance(number, Tensor):
        return number
    if number.is_floating_point():
        return number.float() if number.itemsize < 4 else number
    return number.long()


@final
class _TorchRates(LrSchedule):
    """A torch scheduler as a function of the number of its steps, which a copy makes ahead.

    Its optimizer gets its rates back as they were, and a momentum that the scheduler cycles.
    """

    def __init__(self, scheduler: LRScheduler, *, by_epoch: bool, every: int) -> None:
        self._name = type(scheduler).__name__
        self._by_epoch = by_epoch
        self._every = every
        optimizer = scheduler.optimizer
        cycled = ("betas", "momentum") if getattr(scheduler, "cycle_momentum", False) else ()
        step = SimpleNamespace(_wrapped_by_lr_sched=True)  # or it warns that no step was made
        twin = SimpleNamespace(param_groups=[dict(group) for group in optimizer.param_groups], step=step)
        say_stepped(cast("Any", twin))
        self._groups: list[dict[str, Any]] = twin.param_groups
        self._scheduler = deepcopy(scheduler, {id(optimizer): twin})
        self._factors = [self._factor()]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
            for key in cycled:
                if key in group:
                    group[key] = optimizer.defaults[key]
                    logging.getLogger("evenstep").warning(
                        f"{self._name} sets the rates only: `{key}` stays {group[key]}; build it with "
                        f"`cycle_momentum=False`."
                    )

    def _factor(self) -> float:
        factors = {float(group["lr"]) / float(group["initial_lr"]) for group in self._groups if group["initial_lr"]}
        if not factors:
            return 1.0
        if max(factors) - min(factors) > 1e-12 * max(factors):
            raise ArgumentError(f"{self._name} moves groups differently; write `lr_schedule=PerGroup(…)`.")
        return factors.pop()

    def _after(self, steps: int) -> float:
        while len(self._factors) <= steps:
            try:
                self._scheduler.step()
            except ValueError as error:
                raise ArgumentError(f"{self._name} ends before the run: {clause(error)}.") from None
            self._factors.append(self._factor())
        return self._factors[steps]

    @property
    def needs(self) -> Collection[Need]:
        return ("epochs",) if self._by_epoch else ()

    def __call__(self, update: int, updates: int | None) -> float:
        # an update after the run is only asked
        return self._after((min(update, updates or update) - 1) // self._every)

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        return self._after(epoch // self._every) if self._by_epoch else self(update, updates)

    def check(self, updates: int | None) -> None:
        self._after(0 if self._by_epoch or updates is None else (updates - 1) // self._every)


def _optimizer_and_schedule(module: Any) -> tuple[Optimizer, LrSchedule | None]:
    given: Any = module.configure_optimizers()
    schedulers: list[Any] = []
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list | tuple):
        given, listed = cast("Sequence[Any]", given)
        schedulers = [*listed] if isinstance(listed, list | tuple) else [listed]
    if isinstance(given, list | tuple) and len(given) == 1:
        (given,) = cast("Sequence[Any]", given)
    if isinstance(given, Mapping):
        table = cast("Mapping[str, Any]", given)
        schedulers += [table["lr_scheduler"]] if table.get("lr_scheduler") is not None else []
        given = table.get("optimizer")
    if not isinstance(given, Optimizer) or len(schedulers) > 1:
        raise ArgumentError(
            f"`{type(module).__name__}.configure_optimizers` must give one optimizer and at most one scheduler; use an "
            f"`Engine` for each of several.",
            field="configure_optimizers",
        )
    return given, _schedule(schedulers[0], given) if schedulers else None


def _schedule(given: Any, optimizer: Optimizer) -> LrSchedule:
    table = cast("dict[str, Any]", given) if isinstance(given, dict) else {"scheduler": given}
    scheduler = table.get("scheduler")
    interval, every = table.get("interval", "epoch"), table.get("frequency", 1)
    is_whole = interval == "epoch" or (interval == "step" and every == 1)
    follows = isinstance(scheduler, ReduceLROnPlateau)
    if not isinstance(scheduler, LRScheduler) or follows or scheduler.optimizer is not optimizer or not is_whole:
        raise ArgumentError(
            f"the scheduler must be one of torch, of the optimizer beside it, with the interval 'epoch', or 'step' "
            f"with frequency 1, but is a {type(scheduler).__name__} with {interval!r} and {every}; to follow an "
            f"evaluation write `lr_schedule=Plateau(…)` for the trainer.",
            field="lr_scheduler",
        )
    return _TorchRates(scheduler, by_epoch=interval == "epoch", every=every)
