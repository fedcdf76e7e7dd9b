"""The user's seam: inputs, weight and summed loss of a batch; the update divides by the weight of all its batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from evenstep.data.split import halves, num_samples
from evenstep.data.tree import contents
from evenstep.errors import TaskError
from evenstep.events.shown import Value
from evenstep.oom import is_out_of_memory
from evenstep.pipeline.layers import arguments
from evenstep.tensors import scalar_on

_LARGEST = 1e300  # the sum over an update is finite too
_dummies = 0  # dummy passes that run; a plain number, as backwards may run in threads of torch's
NOW = "_now"
IN_MODEL = "_in_model"  # where a task that is a module says that the model holds its parameters and buffers


@final
class Now:
    """State of the run while a method of a task is called.

    Args:
        caller: gives the engine that the task was given to last, which is referred to weakly.
    """

    def __init__(self, caller: Callable[[], Any] = lambda: None) -> None:
        self._caller = caller

    def __reduce_ex__(self, protocol: object) -> Any:  # a copy of a task belongs to no engine
        return Now, ()

    @property
    def _engine(self) -> Any:
        engine = self._caller()
        if engine is None:
            raise TaskError("`now` has no trainer or engine here; read it in methods such as `loss`.", field="now")
        return engine

    @property
    def is_training(self) -> bool:
        """True if the model is in training mode."""
        return self._engine.model.training

    @property
    def is_evaluating(self) -> bool:
        """True in evaluations and predictions, but not in the loss check."""
        return not (self.is_training or self._engine.parts.check_loss.is_running)

    @property
    def update(self) -> int:
        """Number of the update, counted from 1; in evaluations of the last committed one."""
        return self._engine.progress.update + self.is_training

    def teacher(self, inputs: Any) -> Any:
        """Output of the model for `inputs` with the average's parameters and buffers, in evaluation mode.

        It has no gradient, and its random numbers do not change those of the micro-batch. The class needs
        `uses_average = True`.
        """
        teacher = self._engine.parts.teacher
        if teacher is None:
            raise TaskError("`now.teacher` needs `uses_average = True` in the class of the task.", field="uses_average")
        return teacher(inputs)


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """Result of a task for a micro-batch.

    Args:
        sum: the summed (not averaged) loss over the micro-batch's units, 0-dim; None where there is none to train on.
        weight: the number of units, only from tasks with `late_weight`.
        metrics: numbers as (sum, weight) pairs, `{"accuracy": (correct, total)}`, logged as Σsum/Σweight.
        observed: arguments of the `update` of the task's metric objects, by name, such as `{"preds": scores, "target":
            labels}`; or of one metric only, as a mapping under its name. A task with such metrics must give it.
        count: how many units `sum` covers, if the loss itself knows; `of_mean` sets it.
        shown: texts and images by name, such as `{"text": Text("once upon a time")}`, for writers that take them.
        counts: numbers by name, such as the matching n-grams of BLEU, summed over micro-batches and ranks for
            `Task.derived`. They are not logged.

    >>> import torch
    >>> Loss(torch.tensor(6.0), metrics={"accuracy": (3, 4)}).metrics["accuracy"]
    (3, 4)
    """

    sum: Tensor | None
    weight: Tensor | float | None = None
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    observed: Mapping[str, Any] | None = None
    count: Tensor | float | None = None
    shown: Mapping[str, Value] = field(default_factory=dict)
    counts: Mapping[str, Tensor | float] = field(default_factory=dict)

    @classmethod
    def of_mean(cls, mean: Tensor, count: Tensor | float, **more: Any) -> Self:
        """The loss of a model that gives a mean: its sum is mean · count.

        `Task.weight` must give the same count; with `late_weight` the count is the weight. Causal models of
        `transformers` shift labels first: there the count is `(labels[:, 1:] != -100).sum()`.

        Args:
            mean: over the batch's units, 0-dim; 0 if there are none. On an accelerator its gradient must be finite
                then: divide by `count.clamp(min=1)`.
            count: of these units.
            more: metrics and others, see `Loss`.

        >>> Loss.of_mean(torch.tensor(1.5), 4).sum
        tensor(6.)
        """
        wide = mean.float() if mean.dtype in (torch.float16, torch.bfloat16) else mean
        given = scalar_on(count, wide.device, wide.dtype)
        total = torch.where(given > 0, wide, torch.zeros_like(wide)) * given
        return cls(total, count=count, **more)


class Task(ABC):
    """Inputs, weight, loss and metrics of a batch. Subclass it and write `loss`, and more if needed.

    With summed losses S_m and weights w_m of micro-batches, the gradient of an update is Σ∇S_m / Σw_m, however batches
    are cut; of several tasks the sum of these, each times its coefficient.

    Attributes:
        late_weight: True when the weight is known only after the forward; `loss` then gives it, `weight` is not called.
        metrics: objects of torchmetrics by name, or a `MetricCollection`, such as F1 or AUROC. Copies of them are
            updated with the `observed` of `loss`, and computed over all ranks and all updates since the last write.
        derived: functions of the other metrics by name, `{"ppl": lambda metrics: math.exp(metrics["loss"])}`: of their
            means over all micro-batches and ranks, and of the sums of `Loss.counts`.
        unit: what its weight counts, such as "tokens", in the names of metrics: `perf/tokens_per_s`.
        uses_average: True for a task that calls the average of the model, `self.now.teacher(…)`.

    >>> import torch
    >>> class Classify(Task):
    ...     def loss(self, output, batch):
    ...         return Loss(torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"))
    >>> Classify().weight((torch.zeros(8, 3), torch.zeros(8)))
    8
    """

    late_weight: bool = False
    metrics: Mapping[str, Any] = MappingProxyType({})
    derived: Mapping[str, Callable[[Mapping[str, float]], float]] = MappingProxyType({})
    unit: str = ""
    uses_average: bool = False

    @property
    def now(self) -> Now:
        """State of the trainer or engine that the task was given to last; outside of one it raises TaskError."""
        return vars(self).get(NOW) or Now()

    def prepare(self, model: nn.Module) -> None:
        """Look at the model (in stages this rank's), before it is moved or wrapped; raise ArgumentError to refuse."""

    def transform(self, batch: Any) -> Any:
        """Change a batch on the model's device, before its forward and outside autocast; unchanged by default."""
        return batch

    def inputs(self, batch: Any) -> Any:
        """Arguments of the model: a tuple is its positional, a dict or `UserDict` its keyword arguments, all
        else its only argument. By default the first item of a list or tuple, else the batch itself.
        """
        return batch[0] if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence) else batch

    def weight(self, batch: Any) -> float | Tensor:
        """Number of units that the summed loss of `batch` covers: valid tokens, samples, boxes.

        Called before the forward, with the batch as the loader gave it (on the CPU). By default the number of samples;
        TaskError if that is not certain. A micro-batch of weight 0 is not run: where its loss is not 0, as that of
        images without boxes, set `late_weight`.
        """
        return default_weight(self, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> "Loss | Tensor | None":
        """Evaluate a batch: by default the loss of the model's output, as in training.

        Override it to generate with the model, instead of or beside its loss:

            def evaluate(self, model, batch):
                edits, words = compare(model.generate(batch["source"]), batch["target"])
                return Loss(None, metrics={"wer": (edits, words)})

        Called in evaluation mode and without gradients, with the batch as `transform` gave it. After `Loss(None)` there
        is no `valid/loss`. Each rank calls it for its own micro-batches, so it must ask nothing of other ranks.
        """
        positional, named = arguments((), self.inputs(batch), True)
        return self.loss(model(*positional, **named), batch)

    def predict(self, output: Any, batch: Any) -> Any:
        """Prediction that `Trainer.predict` keeps of the model's output: any tree of tensors; by default the output."""
        return output

    def split(self, batch: Any) -> list[Any]:
        """`batch` in two, because it did not fit into memory; in one, if it can't be cut.

        Weights and summed losses of the parts must add up to those of the whole. By default tensors, arrays and lists
        with an item for each sample are cut along their first dimension; others go to both parts. A batch that can be
        read in two ways is not cut. Override it for features first, graphs, your own classes.
        """
        return halves(batch)

    def state_dict(self) -> dict[str, Any]:
        """State of this task for checkpoints: a tree of dict, list, str, int, float, bool, None and tensors.

        By default nothing, or that of another base class. It must not depend on the micro-batches that this rank has
        run: the first rank's is kept, and given to all.
        """
        other = getattr(super(), "state_dict", None)
        return {} if other is None or IN_MODEL in vars(self) else dict(other())

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take back what `state_dict` gave; with an empty one only where it is not empty now, as after going back."""
        other = getattr(super(), "load_state_dict", None)
        return None if other is None else other(state)

    @abstractmethod
    def loss(self, output: Any, batch: Any) -> Loss | Tensor | None:
        """The loss of the model's output, SUMMED over the batch's units, on the model's device.

        A tensor without elements, `Loss(None)`, or of several tasks None, is a loss of 0, whose weight counts.
        """


def evaluates_itself(task: Task) -> bool:
    """True for tasks that override `evaluate`."""
    return getattr(task.evaluate, "__func__", None) is not Task.evaluate


def loss_of(task: Task, output: Any, batch: Any) -> "Loss | Tensor | None":
    """Call `Task.loss`; add its arguments to errors.

    >>> Line = type("Line", (Task,), {"loss": lambda self, output, target: (output - target).square().sum()})
    >>> try: loss_of(Line(), torch.ones(4, 1), (torch.ones(4, 8), torch.ones(4, 1)))
    ... except TypeError as error: print(error.__notes__[0])
    `Task.loss` was called with the output (float32 [4, 1]) and the whole batch (`[0]` float32 [4, 8], ...).
    """
    try:
        return task.loss(output, batch)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if not is_out_of_memory(error):
            error.add_note(
                f"`Task.loss` was called with the output ({contents(output, formats=True)}) and the whole batch "
                f"({contents(batch, formats=True)})."
            )
        raise


def default_weight(task: Task, batch: Any, known: int | None = None) -> int:
    """Default of `Task.weight`: the number of samples of `batch`; `known` if the loader counted them."""
    samples = num_samples(batch, known)
    if samples is None:
        raise TaskError(
            f"the default `weight` of {type(task).__name__} counts samples, but a batch does not tell how many it "
            f"holds: {contents(batch)}; override `weight` to say how many units the loss of a batch covers.",
            field="weight",
        )
    return samples


def weight_of(task: Task, data: object, what: str | int, num_samples: int | None = None) -> float:
    """The weight that `task` gives a batch; TaskError if it is negative, not finite, or not a number.

    Args:
        what: the batch's name in messages, or the number of the micro-batch.
        num_samples: how many samples were put into it, where that is known.
    """
    called = what if isinstance(what, str) else f"micro-batch {what}"
    by_default = getattr(task.weight, "__func__", None) is Task.weight
    given = default_weight(task, data, num_samples) if by_default else task.weight(data)
    try:
        weight = float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give a number or a 0-dim tensor, but gave {type(given).__name__} for "
            f"{called}: {error}"
        ) from error
    if not 0 <= weight <= _LARGEST:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give the number of units that the summed loss covers, from 0 to "
            f"{_LARGEST:g}, but gave {weight} for {called}."
        )
    return weight


def is_dummy_pass() -> bool:
    """True inside a forward or backward that counts nowhere.

    A rank of `fsdp` with fewer micro-batches than others runs dummy passes beside theirs: with gradients of 0, without
    a loss, and changes of buffers are undone. A forward that collects anything elsewhere asks this first.

    >>> is_dummy_pass()
    False
    """
    return _dummies > 0


@contextmanager
def dummy_pass() -> Generator[None]:
    """Inside, `is_dummy_pass` is True."""
    global _dummies
    _dummies += 1
    try:
        yield
    finally:
        _dummies -= 1
