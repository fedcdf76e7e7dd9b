"""A `LightningModule` as it is: what `Trainer` and `Engine` take, made of one.

`training_step` becomes the forward, the mean that it returns a sum over the units of its batch, `self.log` metrics with
the number of samples as weights, the torch scheduler a function of the update's number. What can't be said so exactly
(manual optimization, hooks that this engine does not call, the number of a batch) is refused by name. Lightning itself
is not imported: whoever has such a module has it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from typing import Any, NotRequired, TypeAlias, TypedDict, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import said
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import share_contents
from evenstep.lightning.optimizers import optimizer_and_schedule
from evenstep.lightning.trainer import TrainerStandIn
from evenstep.optim.schedules import LrSchedule
from evenstep.train.tasks.task import Loss, Task, default_weight

__all__ = ["LightningParts", "parts"]

# Overridden or not: what a run of this engine has no use for, or what its caller calls.
_NOT_OF_TRAINING = (
    *("forward", "training_step", "validation_step", "configure_optimizers", "setup", "configure_model"),
    *("log", "log_dict", "test_step", "predict_step", "prepare_data"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("load_from_checkpoint", "save_hyperparameters", "to_onnx", "to_torchscript", "to_tensorrt", "print"),
)
_NOT_OF_TRAINING_BEGIN = ("on_test_", "on_predict_")
_HOOKS = (
    *("on_", "configure_", "optimizer_", "lr_scheduler_", "transfer_", "backward", "teardown"),
    *("get_extra_state", "set_extra_state"),
)
_OF_A_BATCH = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_OF_BEFORE = (  # hooks of Lightning 1, which nobody calls any more
    *("training_epoch_end", "validation_epoch_end", "training_step_end", "validation_step_end", "tbptt_split_batch"),
    *("on_epoch_start", "on_epoch_end", "on_batch_start", "on_batch_end", "on_post_move_to_device"),
    *("on_pretrain_routine_start", "on_pretrain_routine_end", "on_hpc_save", "on_hpc_load"),
)


class LightningParts(TypedDict):
    """What `Trainer` and `Engine` take, by the names of their arguments; `lr_schedule` if the module has a scheduler.

    Else it is theirs to be given: `Trainer(**parts(module), lr_schedule=…)`.
    """

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
    evenstep.errors.ArgumentError: `module` must be a LightningModule, but is a Linear.
    """
    base = _base_of(module)
    lightning: Any = module
    name = type(module).__name__
    _check_automatic(lightning)
    _check_hooks(module, base, without)
    trainer = TrainerStandIn(name, updates)
    lightning.trainer = trainer
    lightning.setup("fit")
    lightning.configure_model()
    _check_automatic(lightning)  # which either of the two may have changed
    optimizer, schedule = optimizer_and_schedule(lightning, trainer)
    _check_automatic(lightning)
    steps = _Steps(lightning)
    task = type(name, (_StepTask,), {})(lightning, trainer, count)  # messages name a task by its class
    made = LightningParts(model=steps, task=task, optimizer=optimizer)
    return made if schedule is None else {**made, "lr_schedule": schedule}


def _base_of(module: object) -> type:
    bases = [one for one in type(module).__mro__ if one.__name__ == "LightningModule"]
    if not bases or not isinstance(module, nn.Module):
        raise ArgumentError(f"`module` must be a LightningModule, but is {said(module)}.", field="module")
    return bases[-1]


def _check_automatic(lightning: Any) -> None:
    if not lightning.automatic_optimization:
        raise ArgumentError(
            f"`{type(lightning).__name__}` makes its updates itself (`automatic_optimization = False`); "
            f"write its loop with `evenstep.Engine`.",
            field="automatic_optimization",
        )


def _check_hooks(module: nn.Module, base: type, without: Collection[str]) -> None:
    hooks = [each for each in dir(base) if each.startswith(_HOOKS) and each not in _NOT_OF_TRAINING]
    hooks = [each for each in hooks if not each.startswith(_NOT_OF_TRAINING_BEGIN) and callable(getattr(base, each))]
    own = [each for each in hooks if each in vars(module) or getattr(type(module), each) is not getattr(base, each)]
    own = [each for each in (*own, *_OF_BEFORE) if callable(getattr(module, each, None))]
    name = type(module).__name__
    lost = [each for each in own if each not in without]
    if lost:
        raise ArgumentError(
            f"`{name}` overrides {', '.join(f'`{each}`' for each in lost)}, which this engine does not call; "
            f"do it in the steps or in an `evenstep.Hook`, then write `without={lost!r}`.",
            field="without",
        )


_Logged: TypeAlias = "Sequence[tuple[Tensor | float, float | None]]"
"""The numbers that a step has logged under one name, each with the samples that it said it is of."""


@final
class _Log:
    def __init__(self) -> None:
        self.logged: dict[str, list[tuple[Tensor | float, float | None]]] = {}

    def __call__(self, name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
        number = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        self.logged.setdefault(name, []).append((number, batch_size))


@final
class _Steps(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        share_contents(self, module)
        self.__dict__["lightning"] = module  # not as a child: its parameters are there already
        self.__dict__["calls"] = {step: _call_of(module, step) for step in ("training_step", "validation_step")}
        self.training = module.training

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training" and "lightning" in self.__dict__:
            self.__dict__["lightning"].training = value

    def train(self, mode: bool = True) -> "_Steps":
        self.__dict__["lightning"].train(mode)  # which may keep some of its layers as they are
        self.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> "_Steps":
        self.__dict__["lightning"].to(*args, **kwargs)  # which notes the device for `self.device`
        return self

    def forward(self, batch: Any, step: str) -> tuple[Any, dict[str, Any]]:
        module = self.__dict__["lightning"]
        module.__dict__["log"] = log = _Log()
        try:
            given = self.__dict__["calls"][step](batch)
        finally:
            del module.__dict__["log"]  # who trains or tests it by Lightning later logs there
        return given, log.logged


def _call_of(module: nn.Module, step: str) -> Callable[[Any], Any] | None:
    act: Callable[..., Any] | None = getattr(module, step, None)
    if act is None:  # as a module says that it has none
        return None
    name = f"{type(module).__name__}.{step}"
    taken = signature(act)
    # its number depends on how the global batch was cut, and sets have names
    of_set = {"dataloader_idx": None} if step == "validation_step" and "dataloader_idx" in taken.parameters else {}
    for arguments, named in (((None,), {}), ((), {"batch_idx": None}), ((), {})):
        try:
            taken.bind(None, *arguments, **named, **of_set)
        except TypeError:
            continue
        return lambda batch: getattr(module, step)(batch, *arguments, **named, **of_set)
    raise ArgumentError(f"`{name}{taken}` must take a batch and its index alone; give the others a default.")


class _StepTask(Task):
    def __init__(self, module: Any, trainer: TrainerStandIn, count: Callable[[Any], float | Tensor] | None) -> None:
        self._name, self._count = type(module).__name__, count
        own = getattr(module, "validation_step", None)
        base_step = getattr(_base_of(module), "validation_step", None)
        self._validates = own is not None and getattr(own, "__func__", own) is not base_step
        vars(trainer)["_task"] = self

    def inputs(self, batch: Any) -> Any:
        return batch, self._step()

    def weight(self, batch: Any) -> float | Tensor:
        if self._count is not None:
            return self._count(batch)
        return default_weight(self, batch)

    def loss(self, output: Any, batch: Any) -> Loss:
        given, logged = output
        samples = self.weight(batch)
        # of the name `loss` the engine has its own
        metrics = {name: _pair(own, samples) for name, own in logged.items() if name != "loss"}
        return Loss.of_mean(self._mean(given, logged, samples), samples, metrics=metrics)

    def _step(self) -> str:
        return "validation_step" if self._validates and self.now.is_evaluating else "training_step"

    def _mean(self, given: Any, logged: Mapping[str, _Logged], samples: float | Tensor) -> Tensor:
        mean, step = _loss_in(given), self._step()
        if isinstance(mean, Tensor) and mean.numel() == 1:
            return mean.reshape(())
        losses = [name for name in logged if name.endswith("loss")]
        if step == "training_step" or len(losses) != 1:
            raise TaskError(f"`{self._name}.{step}` must return the loss, one number, but gave {said(mean)}.")
        total, size = _pair(logged[losses[0]], samples)
        mean = logged[losses[0]][0][0] if len(logged[losses[0]]) == 1 else total / size
        return torch.as_tensor(mean, dtype=None if isinstance(mean, Tensor) else torch.float64)

    def predict(self, output: Any, batch: Any) -> Any:
        raise TaskError(f"predictions of `{self._name}` are those of the module itself, not of its step; call it.")


def _loss_in(given: Any) -> Any:
    return cast("Mapping[str, Any]", given).get("loss") if isinstance(given, Mapping) else given


def _pair(logged: _Logged, samples: float | Tensor) -> tuple[Tensor | float, Tensor | float]:
    sizes = [samples if size is None else size for _, size in logged]
    return sum(_wide(value) * size for (value, _), size in zip(logged, sizes, strict=True)), sum(sizes)


def _wide(number: Tensor | float) -> Tensor | float:
    if not isinstance(number, Tensor):
        return number
    if number.is_floating_point():
        return number.float() if number.itemsize < 4 else number
    return number.long()
