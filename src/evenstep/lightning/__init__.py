"""A `LightningModule` as it is: what `Trainer` and `Engine` take, made of one.

`training_step` becomes the forward, the mean that it returns a sum over the units of its batch, `self.log` metrics with
the number of samples as weights, the torch scheduler a function of the update's number. What can't be said so exactly
(manual optimization, hooks that this engine does not call, the number of a batch) is refused by name. Lightning itself
is not imported: whoever has such a module has it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from numbers import Real
from typing import Any, NotRequired, TypeAlias, TypedDict, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import advice, require_callable, require_count, said
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
    evenstep.errors.ArgumentError: `module` must be a LightningModule, but is a Linear; give a module as `model=` ...
    """
    base = _base_of(module)
    if updates is not None:
        require_count("updates", updates)
    if count is not None:
        require_callable("count", count, purpose="gives the number of units of a batch")
    lightning: Any = module
    name = type(module).__name__
    _check_automatic(lightning)
    if getattr(module.training_step, "__func__", None) is getattr(base, "training_step", None):
        raise ArgumentError(f"`{name}` has no `training_step`, which gives the loss of a batch; write one.")
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
        write = "give a module as `model=` to `Trainer`, with a `Task` that says what a batch means."
        if isinstance(module, type):
            write = f"write `parts({module.__name__}(…))`."
        elif isinstance(module, nn.Module) and "_orig_mod" in dict(module.named_children()):
            write = "give it as it was before `torch.compile`, and the trainer `train=Training(compile='model')`."
        raise ArgumentError(f"`module` must be a LightningModule, but is {said(module)}; {write}")
    return bases[-1]


def _check_automatic(lightning: Any) -> None:
    if not lightning.automatic_optimization:
        raise ArgumentError(
            f"`{type(lightning).__name__}` has `automatic_optimization = False`: it makes its updates itself, so "
            f"nobody can say what one is; write its loop with `evenstep.Engine`, one for each optimizer."
        )


def _check_hooks(module: nn.Module, base: type, without: Collection[str]) -> None:
    """Raise ArgumentError for a hook that the module counts on."""
    hooks = [each for each in dir(base) if each.startswith(_HOOKS) and each not in _NOT_OF_TRAINING]
    hooks = [each for each in hooks if not each.startswith(_NOT_OF_TRAINING_BEGIN) and callable(getattr(base, each))]
    own = [each for each in hooks if each in vars(module) or getattr(type(module), each) is not getattr(base, each)]
    own = [each for each in (*own, *_OF_BEFORE) if callable(getattr(module, each, None))]
    name = type(module).__name__
    if isinstance(without, str) or not isinstance(cast("object", without), Collection):
        write = f"[{without!r}]" if isinstance(without, str) else "[…]"
        raise ArgumentError(f"`without` must be a list of names, but is {said(without)}; write `without={write}`.")
    lost = [each for each in own if each not in without]
    if lost:
        of_a_batch = next((each for each in lost if each in _OF_A_BATCH), None)
        ways = [f"let its steps begin with `batch = self.{of_a_batch}(batch, …)`"] if of_a_batch else []
        ways += ["do it in an `evenstep.Hook`"] if any(each not in _OF_A_BATCH for each in lost) else []
        raise ArgumentError(
            f"`{name}` overrides {', '.join(f'`{each}`' for each in lost)}, which this engine does not call; "
            f"{', or '.join(ways)}, and say `without={lost!r}` when it is done or not needed."
        )
    if unknown := [each for each in without if each not in own]:
        raise ArgumentError(
            f"`without` names `{unknown[0]}`, but `{name}` overrides no hook of this name; leave it out."
        )


def _refuse_number(name: str) -> Callable[..., Any]:
    def refuse(self: "_Unasked", *_: object, **__: object) -> Any:
        raise TaskError(self.why)

    refuse.__name__ = name
    return refuse


class _Unasked:
    """What a step is given as the number of its batch or set: it may be passed on, not asked.

    Args:
        why: what is said to whoever asks.
    """

    def __init__(self, why: str) -> None:
        self.why = why


_SUMS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "and", "or", "xor", "lshift", "rshift")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool")
_READ = ("int", "index", "float", "str", "format", "neg", "pos", "invert", "abs", "round")
_TAKEN = ("array", "len", "getitem")  # what numpy and torch ask of what becomes an array or a tensor
for _name in (*_SUMS, *(f"r{name}" for name in _SUMS), *_COMPARED, *_READ, *_TAKEN):
    setattr(_Unasked, f"__{_name}__", _refuse_number(_name))


_SHOWN = (
    *("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "sync_dist", "sync_dist_group"),
    *("add_dataloader_idx", "metric_attribute", "rank_zero_only"),
)
_Logged: TypeAlias = "Sequence[tuple[Tensor | float, float | None]]"
"""The numbers that a step has logged under one name, each with the samples that it said it is of."""


def _said_of(value: Any) -> str:
    """What a step logs that is no number, and what to do."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}; log its mean"
    if not callable(getattr(value, "compute", None)):
        return f"{said(value)}; log one number under each name"
    return (
        f"{said(value)}; log what its call gives where a mean of that is meant, and give others to `Task.metrics` of a "
        f"task of yours, with the module as `model=` of the `Trainer`"
    )


@final
class _Log:
    """Stands in the place of the module's `log` while one of its steps runs: keeps what the step logs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.logged: dict[str, list[tuple[Tensor | float, float | None]]] = {}

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
        if unknown := [each for each in how_shown if each not in _SHOWN]:
            raise TaskError(
                f"`{self._name}` logs `{name}` with `{unknown[0]}`, which means nothing; {advice(unknown[0], _SHOWN)}"
            )
        if shown:
            raise TaskError(f"`{self._name}` logs `{name}` with arguments by position; name them, `batch_size=…`.")
        if reduce_fx not in ("mean", torch.mean, "avg"):
            raise TaskError(
                f"`{self._name}` logs `{name}` with `reduce_fx={reduce_fx!r}`, but metrics are means over samples "
                f"here; log it as a mean, or compute it in an `evenstep.Hook`."
            )
        if isinstance(value, _Unasked):
            raise TaskError(value.why)
        if not isinstance(value, Tensor | Real) or (isinstance(value, Tensor) and value.numel() != 1):
            raise TaskError(f"`{self._name}` logs `{name}`, which must be a number, but is {_said_of(value)}.")
        if batch_size is not None and not isinstance(batch_size, Tensor | Real):
            raise TaskError(
                f"`{self._name}` logs `{name}` with `batch_size={batch_size!r}`, which must be the number of samples "
                f"that the value is a mean over; give a number, or leave it out."
            )
        number = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        self.logged.setdefault(name, []).append((number, batch_size))


@final
class _Steps(nn.Module):
    """The module with its step as the forward: the same parameters, under the same names, in the same tables."""

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
        """What the step returns, and what it has logged."""
        module = self.__dict__["lightning"]
        module.__dict__["log"] = log = _Log(type(module).__name__)
        try:
            given = self.__dict__["calls"][step](batch)
        finally:
            del module.__dict__["log"]  # who trains or tests it by Lightning later logs there
        _check_loss(f"{type(module).__name__}.{step}", _loss_in(given), log.logged.get("loss", ()))
        return given, log.logged


def _call_of(module: nn.Module, step: str) -> Callable[[Any], Any] | None:
    """The step as a function of the batch alone: numbers are passed as it takes them, by position or by name."""
    act: Callable[..., Any] | None = getattr(module, step, None)
    if act is None:  # as a module says that it has none
        return None
    name = f"{type(module).__name__}.{step}"
    taken = signature(act)
    if "dataloader_iter" in taken.parameters:
        raise ArgumentError(
            f"`{name}` takes the iterator of a loader, from which it would take batches that nobody has counted; let "
            f"it take a batch, `{step}(self, batch, batch_idx)`."
        )
    index = _Unasked(
        f"`{name}` asks the number of its batch, which depends on how the global batch was cut; go by "
        f"`self.global_step`, the number of updates."
    )
    of_set: dict[str, Any] = {}
    if step == "validation_step" and "dataloader_idx" in taken.parameters:
        of_set["dataloader_idx"] = _Unasked(
            f"`{name}` asks the number of its set of data, but sets have names here, which its metrics begin with; let "
            f"it do the same with each, under the same names."
        )
    for arguments, named in (((index,), {}), ((), {"batch_idx": index}), ((), {})):
        try:
            taken.bind(None, *arguments, **named, **of_set)
        except TypeError:
            continue
        return lambda batch: getattr(module, step)(batch, *arguments, **named, **of_set)
    raise ArgumentError(
        f"`{name}{taken}` takes more than a batch and its index, and there is nothing else to give it; let the others "
        f"have a default, such as `dataloader_idx=0`."
    )


class _StepTask(Task):
    """What the steps of a module say of a batch."""

    def __init__(self, module: Any, trainer: TrainerStandIn, count: Callable[[Any], float | Tensor] | None) -> None:
        self._name, self._count = type(module).__name__, count
        own = getattr(module, "validation_step", None)
        base_step = getattr(_base_of(module), "validation_step", None)
        self._validates = own is not None and getattr(own, "__func__", own) is not base_step
        vars(trainer)["_task"] = self

    def inputs(self, batch: Any) -> Any:
        """The batch, and which step is to be made."""
        return batch, self._step()

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
        if step == "training_step" and isinstance(mean, Tensor):
            raise TaskError(
                f"`{self._name}.training_step` must give the loss, one number, but gave a tensor of shape "
                f"{list(mean.shape)}; give its mean."
            )
        if step == "training_step":
            raise TaskError(
                f"`{self._name}.training_step` must give the loss, but gave {said(mean)}; a batch without a loss is "
                f"one whose `count` is 0."
            )
        losses = [name for name in logged if name.endswith("loss")]
        if len(losses) == 1:
            return self._logged_mean(losses[0], logged[losses[0]], float(samples))
        named = " and ".join(f"`{name}`" for name in losses)
        found = f"of what it logs {named} may be it" if losses else "logs none under a name that ends in `loss`"
        raise TaskError(f"`{self._name}.validation_step` returns no loss, and {found}; return the loss.")

    def _logged_mean(self, name: str, logged: _Logged, samples: float) -> Tensor:
        """What an evaluation has logged as its loss, once or for parts of its batch."""
        total, size = _pair(logged, samples)
        if float(size) not in (samples, samples * len(logged)):
            sizes = " + ".join(f"{samples if one is None else float(one):g}" for _, one in logged)
            raise TaskError(
                f"`{self._name}.validation_step` returns no loss, and logs `{name}` as a mean over "
                f"`batch_size={sizes}`, but a batch of {samples:g} units counts as that many in the loss of an "
                f"evaluation; leave `batch_size=` out where the mean is over these, or say what a batch counts, "
                f"`parts(module, count=lambda batch: …)`."
            )
        mean = logged[0][0] if len(logged) == 1 else total / size
        return torch.as_tensor(mean, dtype=None if isinstance(mean, Tensor) else torch.float64)

    def predict(self, output: Any, batch: Any) -> Any:
        """Refused: the forward is a step with a loss."""
        raise TaskError(
            f"predictions of `{self._name}` are those of the module itself, not of its step; call it, or give it as "
            f"`model=` to a `Trainer` with a task of yours."
        )


def _loss_in(given: Any) -> Any:
    """What a step has returned as its loss, in either way."""
    return cast("Mapping[str, Any]", given).get("loss") if isinstance(given, Mapping) else given


def _pair(logged: _Logged, samples: float | Tensor) -> tuple[Tensor | float, Tensor | float]:
    """The sum and the weight of what a step has logged under one name."""
    sizes = [samples if size is None else size for _, size in logged]
    return sum(_wide(value) * size for (value, _), size in zip(logged, sizes, strict=True)), sum(sizes)


def _wide(number: Tensor | float) -> Tensor | float:
    """A number in a format that holds it times a number of samples: 30000 in float16 twice would be infinite."""
    if not isinstance(number, Tensor):
        return number
    if number.is_floating_point():
        return number.float() if number.itemsize < 4 else number
    return number.long()


def _check_loss(step: str, mean: Any, logged: _Logged) -> None:
    """Raise TaskError if what is logged as `loss`, the name of the engine's own metric, is not what was returned."""
    if not isinstance(mean, Tensor) or mean.numel() != 1 or torch.compiler.is_compiling():
        return
    for value, _ in logged:
        if isinstance(value, Tensor) and value.data_ptr() == mean.data_ptr():
            continue  # nothing is read from a device
        one, other = float(value), mean.item()
        if not (math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))):
            raise TaskError(
                f"`{step}` logs `loss`, which is another number than the loss that it returns; log it under another "
                f"name, as `loss` is the mean of what it returns."
            )
