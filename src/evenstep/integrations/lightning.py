"""A `LightningModule` as it is: the arguments of `Trainer` and `Engine` made of one. Lightning is not imported."""

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.errors import ArgumentError, TaskError, clause
from evenstep.internals import say_stepped, share_contents
from evenstep.optim.schedules import LrSchedule, Need
from evenstep.train.tasks.metrics import LaterMetrics
from evenstep.train.tasks.task import Loss, Task, default_weight

# Beginnings of the names of hooks, and of hooks that training does not call or `parts` does.
_HOOKS = ("on_", "configure_", "optimizer_", "lr_scheduler_", "transfer_", "backward", "teardown", "get_", "set_extra")
_NOT_OF_TRAINING = ("configure_optimizers", "configure_model", "on_test_", "on_predict_")


def parts(
    module: nn.Module,
    *,
    updates: int | None = None,
    count: Callable[[Any], float | Tensor] | None = None,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """`model`, `task`, `optimizer` and perhaps `lr_schedule` of a `LightningModule`, arguments of a `Trainer`.

    For micro-batches m of w_m units with means l_m, an update takes g = Σ w_m ∇l_m / Σ w_m; Lightning: 1/M · Σ ∇l_m.

    Args:
        module: its parameters are trained in place, under their own names.
        updates: value of `self.trainer.estimated_stepping_batches` in `configure_optimizers`.
        count: number of units that the mean of a batch is over, on the CPU; its number of samples by default.
        without: hooks that the module overrides and this engine does not call, which it can do without.

    Raises:
        ArgumentError: the module optimizes by itself, or overrides hooks that are not called.
    """
    name = type(module).__name__
    lightning: Any = module
    bases = [one for one in type(module).__mro__ if one.__name__ == "LightningModule"]
    if not bases or not lightning.automatic_optimization:
        raise ArgumentError(
            f"`module` must be a LightningModule with `automatic_optimization`, but `{name}` is not; write its loop "
            f"with `evenstep.Engine`.",
            field="module",
        )
    _check_hooks(module, bases[-1], without)
    task = type(name, (_StepTask,), {})(lightning, bases[-1], count)  # messages name a task by its class
    lightning.trainer = _TrainerStandIn(task, updates)
    lightning.setup("fit")
    lightning.configure_model()
    optimizer, schedule = _optimizer_and_schedule(lightning)
    made = {"model": _Steps(lightning), "task": task, "optimizer": optimizer}
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

    def __init__(self, task: Task, updates: int | None) -> None:
        self._task = task
        if updates is not None:
            self.estimated_stepping_batches = self.max_steps = updates

    @property
    def global_step(self) -> int:
        return self._task.now.update - self._task.now.is_training

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("__"):
            raise AttributeError(asked)
        if asked in ("estimated_stepping_batches", "max_steps"):
            raise ArgumentError(f"the module asks for `{asked}`; give `parts(module, updates=…)`.", field="updates")
        raise TaskError(f"the module asks `{asked}` of Lightning's trainer; use an `evenstep.Hook`.", field=asked)


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

    def forward(self, batch: Any, step: str) -> tuple[Any, dict[str, list[Any]], dict[str, Any]]:
        """Result of a step, logged numbers with their batch sizes, and metrics with their arguments."""
        module = self.__dict__["lightning"]
        numbers: dict[str, list[Any]] = {}
        seen: dict[str, Any] = {}

        def log(name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
            if isinstance(value, nn.Module):
                calls = updates.get(id(value), [])
                if len(calls) != 1:
                    raise TaskError(
                        f"`{name}` logs a {type(value).__name__} that this step has updated {len(calls)} times; "
                        f"update it once in each step, a `MetricCollection` with `compute_groups=False`.",
                        field=name,
                    )
                seen[name] = value, calls[0]
                return
            number = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
            if isinstance(number, Tensor) and number.itemsize < 4:
                number = number.float()  # a sum needs more bits
            numbers.setdefault(name, []).append((number, batch_size))

        _, *others = signature(getattr(module, step)).parameters.values()
        # such as `batch_idx`, which would depend on the cut
        required = [one for one in others if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        with _recorded([part for part in module.modules() if hasattr(part, "metric_state")]) as updates:
            module.__dict__["log"] = log
            try:
                return getattr(module, step)(batch, *[None] * len(required)), numbers, seen
            finally:
                del module.__dict__["log"]


class _StepTask(Task):
    def __init__(self, module: Any, base: type, count: Callable[[Any], float | Tensor] | None) -> None:
        step: Any = getattr(module, "validation_step", None)
        own = getattr(step, "__func__", step) is not getattr(base, "validation_step", None)
        self._validates = step is not None and own
        self._count = count
        self.metrics = self._later = LaterMetrics()

    @property
    def _step(self) -> str:
        return "validation_step" if self._validates and self.now.is_evaluating else "training_step"

    def inputs(self, batch: Any) -> Any:
        return batch, self._step

    def weight(self, batch: Any) -> float | Tensor:
        return default_weight(self, batch) if self._count is None else self._count(batch)

    def loss(self, output: Any, batch: Any) -> Loss:
        given, numbers, seen = output
        samples = self.weight(batch)
        for name, (metric, _) in seen.items():
            self._later.add(name, metric)
        pairs: dict[str, Any] = {}
        for name, each in numbers.items():
            sizes = [samples if size is None else size for _, size in each]
            pairs[name] = sum(value * size for (value, _), size in zip(each, sizes, strict=True)), sum(sizes)
        mean = self._mean(given, numbers, pairs)
        pairs.pop("loss", None)  # the engine itself has a metric of this name
        observed = {name: values for name, (_, values) in seen.items()}
        return Loss.of_mean(mean, samples, metrics=pairs, observed=observed)

    def predict(self, output: Any, batch: Any) -> Any:
        raise TaskError("predictions of a LightningModule come from itself, not from its step; call the module.")

    def _mean(self, given: Any, numbers: Mapping[str, Any], pairs: Mapping[str, Any]) -> Tensor:
        mean = cast("Mapping[str, Any]", given).get("loss") if isinstance(given, Mapping) else given
        if isinstance(mean, Tensor) and mean.numel() == 1:
            return mean.reshape(())
        losses = [name for name in numbers if name.endswith("loss")]
        if self._step == "training_step" or len(losses) != 1:
            raise TaskError(
                f"`{type(self).__name__}.{self._step}` must return the loss, one number, but gave a "
                f"{type(mean).__name__}.",
                field=self._step,
            )
        each = numbers[losses[0]]
        total, size = pairs[losses[0]]
        mean = each[0][0] if len(each) == 1 else total / size
        return torch.as_tensor(mean, dtype=None if isinstance(mean, Tensor) else torch.float64)


@final
class _TorchRates(LrSchedule):
    """A torch scheduler as a function of the number of its steps, which a copy makes ahead."""

    def __init__(self, scheduler: LRScheduler, *, by_epoch: bool, every: int) -> None:
        self._name = type(scheduler).__name__
        self._by_epoch = by_epoch
        self._every = every
        optimizer = scheduler.optimizer
        step = SimpleNamespace(_wrapped_by_lr_sched=True)  # or it warns that no step was made
        twin = SimpleNamespace(param_groups=[dict(group) for group in optimizer.param_groups], step=step)
        say_stepped(cast("Any", twin))
        self._groups: list[dict[str, Any]] = twin.param_groups
        self._scheduler = deepcopy(scheduler, {id(optimizer): twin})
        self._factors = [self._factor()]
        cycles = getattr(scheduler, "cycle_momentum", False)
        for group in optimizer.param_groups:  # undo the scheduler's first step
            group["lr"] = group["initial_lr"]
            for key in group.keys() & {"betas", "momentum"} if cycles else ():
                group[key] = optimizer.defaults[key]
                logging.getLogger("evenstep").warning(f"{self._name} sets the rates only: `{key}` stays {group[key]}.")

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
        given, schedulers = cast("Sequence[Any]", given)
    if isinstance(given, list | tuple) and len(given) == 1:
        (given,) = cast("Sequence[Any]", given)
    if isinstance(given, Mapping):
        table = cast("Mapping[str, Any]", given)
        schedulers = [table["lr_scheduler"]] if table.get("lr_scheduler") is not None else []
        given = table.get("optimizer")
    if not isinstance(given, Optimizer) or len(schedulers) > 1:
        raise ArgumentError(
            f"`{type(module).__name__}.configure_optimizers` must give one optimizer and at most one scheduler; use an "
            f"`Engine` for each of several.",
            field="configure_optimizers",
        )
    if not schedulers:
        return given, None
    options = cast("dict[str, Any]", schedulers[0]) if isinstance(schedulers[0], dict) else {"scheduler": schedulers[0]}
    scheduler: Any = options.get("scheduler")
    interval, every = options.get("interval", "epoch"), options.get("frequency", 1)
    is_whole = interval == "epoch" or (interval == "step" and every == 1)
    is_function = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
    if not is_function or scheduler.optimizer is not given or not is_whole:
        raise ArgumentError(
            f"the scheduler must be one of torch, of this optimizer, by 'epoch' or by 'step' with frequency 1, but is "
            f"a {type(scheduler).__name__} by {interval!r} with {every}; give the trainer an `lr_schedule`.",
            field="lr_scheduler",
        )
    return given, _TorchRates(scheduler, by_epoch=interval == "epoch", every=every)
