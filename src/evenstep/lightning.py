"""A `LightningModule` as it is: what `Trainer` and `Engine` take, made of one.

`training_step` becomes the forward, the mean that it returns a sum over the units of its batch, `self.log` metrics with
the number of samples as weights, the torch scheduler a function of the update's number. What can't be said so exactly
(manual optimization, hooks that this engine does not call, the number of a batch) is refused by name. Lightning itself
is not imported: whoever has such a module has it.
"""

from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any, TypedDict, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.arguments import said
from evenstep.errors import ArgumentError, TaskError, clause
from evenstep.internals import say_stepped, share_contents
from evenstep.optim.schedules import LrSchedule
from evenstep.optim.schedules.schedule import Need
from evenstep.train.tasks.task import Loss, Task, default_weight

__all__ = ["LightningParts", "parts"]

# Overridden or not: what a run of this engine has no use for, or what its caller calls.
_NOT_OF_TRAINING = (
    *("forward", "training_step", "validation_step", "configure_optimizers", "setup", "configure_model"),
    *("log", "log_dict", "test_step", "predict_step", "prepare_data", "teardown"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("load_from_checkpoint", "save_hyperparameters", "to_onnx", "to_torchscript", "to_tensorrt", "print"),
)
_NOT_OF_TRAINING_BEGIN = ("on_test_", "on_predict_")
_HOOKS = ("on_", "configure_", "optimizer_", "lr_scheduler_", "transfer_", "backward")


class LightningParts(TypedDict):
    """What `Trainer` and `Engine` take, by the names of their arguments."""

    model: nn.Module
    task: Task
    optimizer: Optimizer
    lr_schedule: LrSchedule | None


def parts(
    module: nn.Module,
    *,
    updates: int | None = None,
    count: Callable[[Any], float | Tensor] | None = None,
    without: Collection[str] = (),
) -> LightningParts:
    """Model, task, optimizer and LR schedule of a `LightningModule`.

    For micro-batches m of w_m units, of which `training_step` returns the means l_m, an update goes by

        g = Σ w_m ∇l_m / Σ w_m

    and not by the mean of the means, 1/M · Σ ∇l_m, by which Lightning goes where batches differ in size.

    Args:
        module: the parameters are trained in place, under the names that they have in it.
        updates: what `self.trainer.estimated_stepping_batches` gives in `configure_optimizers`.
        count: how many units the mean of a batch is over, on the CPU; its number of samples by default.
        without: hooks that the module overrides and this engine does not call, which it can do without.

    Raises:
        ArgumentError: it is no `LightningModule`, or does what can't be said exactly; it is named.

    >>> import evenstep
    >>> model = evenstep.lightning.parts(nn.Linear(2, 1))
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `module` must be a LightningModule, but is a Linear; give a module as `model=` ...
    """
    base = _base_of(module)
    lightning: Any = module
    name = type(module).__name__
    if not lightning.automatic_optimization:
        raise ArgumentError(
            f"`{name}` has `automatic_optimization = False`: it makes its updates itself, so nobody can say what one "
            f"is; write its loop with `evenstep.Engine`, one for each optimizer."
        )
    _check_hooks(module, base, without)
    trainer = _Trainer(name, updates)
    lightning.trainer = trainer
    lightning.setup("fit")
    lightning.configure_model()
    optimizer, schedule = _optimizer_and_schedule(lightning)
    steps = _Steps(lightning)
    task = _StepTask(lightning, trainer, count)
    return LightningParts(model=steps, task=task, optimizer=optimizer, lr_schedule=schedule)


def _base_of(module: object) -> type:
    bases = [one for one in type(module).__mro__ if one.__name__ == "LightningModule"]
    if not bases or not isinstance(module, nn.Module):
        raise ArgumentError(
            f"`module` must be a LightningModule, but is {said(module)}; give a module as `model=` to `Trainer`, with "
            f"a `Task` that says what a batch means."
        )
    return bases[-1]


def _check_hooks(module: nn.Module, base: type, without: Collection[str]) -> None:
    """Raise ArgumentError for a hook that the module counts on."""
    hooks = [each for each in dir(base) if each.startswith(_HOOKS) and each not in _NOT_OF_TRAINING]
    hooks = [each for each in hooks if not each.startswith(_NOT_OF_TRAINING_BEGIN) and callable(getattr(base, each))]
    own = [each for each in hooks if getattr(type(module), each) is not getattr(base, each)]
    lost = [each for each in own if each not in without]
    name = type(module).__name__
    if lost:
        raise ArgumentError(
            f"`{name}` overrides {', '.join(f'`{each}`' for each in lost)}, which this engine does not call; do it in "
            f"an `evenstep.Hook`, and say `without={lost!r}` when it is done or not needed."
        )
    if unknown := [each for each in without if each not in own]:
        raise ArgumentError(
            f"`without` names `{unknown[0]}`, but `{name}` overrides no hook of this name; leave it out."
        )


@final
class _Trainer:
    """What stands in for Lightning's trainer: what it knows here it gives, all else is refused."""

    def __init__(self, name: str, updates: int | None) -> None:
        self._name, self._updates = name, updates
        self._task: Task | None = None

    @property
    def global_step(self) -> int:
        """How many updates were committed before this one."""
        if self._task is None:
            return 0
        now = self._task.now
        return now.update - now.is_training

    @property
    def estimated_stepping_batches(self) -> int:
        """How many updates the run has."""
        if self._updates is None:
            raise ArgumentError(
                f"`{self._name}` asks `self.trainer.estimated_stepping_batches`; say how many it will be, "
                f"`parts(module, updates=…)`."
            )
        return self._updates

    @property
    def max_steps(self) -> int:
        """The same."""
        return self.estimated_stepping_batches

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("__"):
            raise AttributeError(asked)
        raise TaskError(
            f"`{self._name}` asks `{asked}` of Lightning's trainer, but evenstep's has no such thing; give the module "
            f"what it needs when it is built, or do it in an `evenstep.Hook`. `global_step` is the number of updates."
        )


def _refuse_number(name: str) -> Callable[..., Any]:
    def refuse(self: "_BatchIndex", *_: object) -> Any:
        raise TaskError(
            f"`{self.step}` asks the number of its batch, which depends on how the global batch was cut; go by "
            f"`self.global_step`, the number of updates."
        )

    refuse.__name__ = name
    return refuse


class _BatchIndex:
    """What a step is given as `batch_idx`: it may be passed on, not asked."""

    def __init__(self, step: str) -> None:
        self.step = step

    __hash__ = cast("Any", None)


_ASKED = ("add", "sub", "mul", "mod", "floordiv", "radd", "eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_ASKED, "int", "index", "float", "bool", "str", "format"):
    setattr(_BatchIndex, f"__{_name}__", _refuse_number(_name))


@final
class _Log:
    """Stands in the place of the module's `log`: keeps what one step has logged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.logged: dict[str, tuple[Tensor | float, float | None]] = {}

    def __call__(
        self,
        name: str,
        value: Any,
        *shown: Any,
        reduce_fx: object = "mean",
        batch_size: int | None = None,
        **how_shown: Any,
    ) -> None:
        """Take a number; how Lightning would show it does not matter here."""
        if shown:
            raise TaskError(f"`{self._name}` logs `{name}` with arguments by position; name them, `batch_size=…`.")
        if reduce_fx not in ("mean", torch.mean, "avg"):
            raise TaskError(
                f"`{self._name}` logs `{name}` with `reduce_fx={reduce_fx!r}`, but metrics are means over samples "
                f"here; log it as a mean, or compute it in an `evenstep.Hook`."
            )
        if not isinstance(value, Tensor | float | int) or (isinstance(value, Tensor) and value.numel() != 1):
            raise TaskError(
                f"`{self._name}` logs `{name}`, which must be a number, but is {said(value)}; of a metric object log "
                f"what its call gives, or give the objects to `Task.metrics`."
            )
        number = value.detach().reshape(()) if isinstance(value, Tensor) else value
        self.logged[name] = number, batch_size


@final
class _Steps(nn.Module):
    """The module with its step as the forward: the same parameters, under the same names, in the same tables."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        share_contents(self, module)
        self.__dict__["lightning"] = module  # not as a child: its parameters are there already
        self.__dict__["log"] = _Log(type(module).__name__)
        module.__dict__["log"] = self.__dict__["log"]

    def train(self, mode: bool = True) -> "_Steps":
        super().train(mode)
        self.__dict__["lightning"].training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> "_Steps":
        self.__dict__["lightning"].to(*args, **kwargs)  # which notes the device for `self.device`
        return self

    def forward(self, batch: Any, step: str) -> tuple[Any, dict[str, Any]]:
        """What the step returns, and what it has logged."""
        module, log = self.__dict__["lightning"], self.__dict__["log"]
        log.logged = {}
        modes = module.training
        module.training = self.training  # whatever has set the mode of this one alone
        try:
            act: MethodType = getattr(module, step)
            takes_index = act.__func__.__code__.co_argcount > 2
            given = act(batch, _BatchIndex(f"{type(module).__name__}.{step}")) if takes_index else act(batch)
        finally:
            module.training = modes
        return given, log.logged


@final
class _StepTask(Task):
    """What the steps of a module say of a batch."""

    def __init__(self, module: Any, trainer: _Trainer, count: Callable[[Any], float | Tensor] | None) -> None:
        self._name, self._count = type(module).__name__, count
        base = _base_of(module)
        self._validates = getattr(type(module), "validation_step", None) is not getattr(base, "validation_step", None)
        vars(trainer)["_task"] = self

    def inputs(self, batch: Any) -> Any:
        """The batch, and which step is to be made."""
        return batch, "validation_step" if self._validates and self.now.is_evaluating else "training_step"

    def weight(self, batch: Any) -> float | Tensor:
        """How many units the mean of a batch is over."""
        if self._count is not None:
            return self._count(batch)
        try:
            return default_weight(self, batch)
        except TaskError as error:
            raise TaskError(
                f"a batch does not tell how many samples the mean of `{self._name}.training_step` is over; say so, "
                f"`parts(module, count=lambda batch: …)`. ({error})"
            ) from None

    def loss(self, output: Any, batch: Any) -> Loss:
        """The mean that the step gave, times what it is over."""
        given, logged = output
        step = "validation_step" if self._validates and self.now.is_evaluating else "training_step"
        samples = self.weight(batch)
        mean = self._mean(step, given, logged)
        metrics = {
            name: (value * (samples if size is None else size), samples if size is None else size)
            for name, (value, size) in logged.items()
            if name != "loss"  # that of the engine is of the same name
        }
        return Loss.of_mean(mean, samples, metrics=metrics)

    def _mean(self, step: str, given: Any, logged: Mapping[str, Any]) -> Tensor:
        mean = cast("Mapping[str, Any]", given).get("loss") if isinstance(given, Mapping) else given
        if isinstance(mean, Tensor):
            return mean
        if step == "training_step":
            raise TaskError(
                f"`{self._name}.training_step` must give the loss, but gave {said(mean)}; a batch without a loss is "
                f"one whose `count` is 0."
            )
        losses = [value for name, (value, _) in logged.items() if name.endswith("loss")]
        if len(losses) == 1 and isinstance(losses[0], Tensor):
            return losses[0]
        raise TaskError(
            f"`{self._name}.validation_step` returns nothing, and of what it logs {len(losses)} names end in `loss`, "
            f"so that none is the loss; return it."
        )

    def predict(self, output: Any, batch: Any) -> Any:
        """Refused: the forward is a step with a loss."""
        raise TaskError(
            f"predictions of `{self._name}` are those of the module itself, not of its step; call it, or give it as "
            f"`model=` to a `Trainer` with a task of yours."
        )


@final
class _TorchRates(LrSchedule):
    """A torch scheduler as a function of the number of its steps: it makes them ahead, and notes the rates.

    Args:
        scheduler: of an optimizer whose rates are given back as they were.
        by_epoch: whether it makes its steps at the ends of epochs.
        every: after how many updates, or epochs.
    """

    def __init__(self, scheduler: LRScheduler, *, by_epoch: bool, every: int) -> None:
        self._scheduler, self._by_epoch, self._every = scheduler, by_epoch, every
        self._groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
        self._kept = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        self._live = [dict(group) for group in self._kept]
        self._factors = [self._factor()]
        self._put(self._first())

    def _first(self) -> list[dict[str, Any]]:
        return [{**group, "lr": group["initial_lr"]} for group in self._kept]

    def _put(self, values: list[dict[str, Any]]) -> None:
        for group, value in zip(self._groups, values, strict=True):
            group.update(value)

    def _factor(self) -> float:
        factors = {float(group["lr"]) / float(group["initial_lr"]) for group in self._groups}
        if max(factors) - min(factors) > 1e-12 * max(factors):
            raise ArgumentError(
                f"{type(self._scheduler).__name__} gives the optimizer's groups schedules of their own; say them as "
                f"`lr_schedule=PerGroup(…)`."
            )
        return factors.pop()

    def _after(self, steps: int) -> float:
        """The multiplier after so many steps of the scheduler."""
        if len(self._factors) <= steps:
            before = [dict(group) for group in self._groups]
            self._put(self._live)
            try:
                while len(self._factors) <= steps:
                    self._step()
                self._live = [{key: group[key] for key in self._kept[0]} for group in self._groups]
            finally:
                self._put(before)
        return self._factors[steps]

    def _step(self) -> None:
        say_stepped(self._scheduler.optimizer)
        try:
            self._scheduler.step()
        except ValueError as error:
            raise ArgumentError(
                f"{type(self._scheduler).__name__} ends after {len(self._factors) - 1} steps, before the run does: "
                f"{clause(error)}; build it for more, or make the run shorter."
            ) from None
        self._factors.append(self._factor())
        for group, kept in zip(self._groups, self._kept, strict=True):
            moved = [key for key, value in kept.items() if key != "lr" and group.get(key) != value]
            if moved:
                raise ArgumentError(
                    f"{type(self._scheduler).__name__} also moves `{moved[0]}`, which an LR schedule can't; build it "
                    f"without that, such as with `cycle_momentum=False`."
                )

    @property
    def needs(self) -> Collection[Need]:
        """Epochs, where it counts them."""
        return ("epochs",) if self._by_epoch else ()

    def __call__(self, update: int, updates: int | None) -> float:
        return self._after(
            (min(update, updates or update) - 1) // self._every
        )  # what comes after the run is only asked

    def in_epoch(self, update: int, epoch: int, updates: int | None) -> float:
        return self._after(epoch // self._every) if self._by_epoch else self(update, updates)

    def check(self, updates: int | None) -> None:
        self._after(0 if self._by_epoch or updates is None else (updates - 1) // self._every)


def _optimizer_and_schedule(module: Any) -> tuple[Optimizer, LrSchedule | None]:
    """What `configure_optimizers` gives, in one of the ways that Lightning takes."""
    name = type(module).__name__
    given: Any = module.configure_optimizers()
    schedulers: list[Any] = []
    if isinstance(given, tuple) and len(cast("tuple[Any, ...]", given)) == 2 and isinstance(given[0], list | tuple):
        given, listed = cast("tuple[Any, Any]", given)
        schedulers = [*listed] if isinstance(listed, list | tuple) else [listed]
    if isinstance(given, list | tuple):
        several = cast("list[Any]", given)
        if len(several) != 1:
            raise ArgumentError(
                f"`{name}.configure_optimizers` gives {len(several)} optimizers, whose updates only the module could "
                f"tell apart; several over one model at once are `evenstep.optim.MultiOptimizer`, several models an "
                f"`Engine` for each."
            )
        given = several[0]
    if isinstance(given, Mapping):
        table = cast("Mapping[str, Any]", given)
        schedulers += [table["lr_scheduler"]] if table.get("lr_scheduler") is not None else []
        given = table.get("optimizer")
    if not isinstance(given, Optimizer):
        raise ArgumentError(
            f"`{name}.configure_optimizers` must give an optimizer, but gives {said(given)}; return one."
        )
    if len(schedulers) > 1:
        raise ArgumentError(
            f"`{name}.configure_optimizers` gives {len(schedulers)} schedulers for one optimizer; give one."
        )
    return given, _schedule(name, schedulers[0]) if schedulers else None


def _schedule(name: str, given: Any) -> LrSchedule:
    table = cast("dict[str, Any]", given) if isinstance(given, dict) else {"scheduler": given}
    scheduler = table.get("scheduler")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ArgumentError(
            f"`{name}` gives a ReduceLROnPlateau, which goes by its own count of evaluations; give the trainer "
            f"`lr_schedule=Plateau(metric='valid/loss', factor={scheduler.factor}, "
            f"patience_evaluations={scheduler.patience + 1})`, and return the optimizer alone."
        )
    if not isinstance(scheduler, LRScheduler):
        raise ArgumentError(f"`{name}` gives {said(scheduler)} as its scheduler, which must be one of torch; give one.")
    interval = table.get("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise ArgumentError(f"`interval` of the scheduler of `{name}` must be 'epoch' or 'step', but is {interval!r}.")
    return _TorchRates(scheduler, by_epoch=interval == "epoch", every=int(table.get("frequency", 1)))
