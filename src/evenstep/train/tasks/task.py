"""The user's seam: what a batch means.

A task turns a batch into the model's inputs, says how many units the batch's loss covers, and sums the loss over
them. It does not divide: the update divides by the weight of all its micro-batches, over all ranks, once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, cast, final

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
from evenstep.train.tasks.now import NOW, Now

_LARGEST = 1e300  # the sum over an update is finite too
IN_MODEL = "_in_model"  # where a task that is a module says that the model holds its parameters and buffers


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """Result of a task for a micro-batch.

    Args:
        sum: the summed (not averaged) loss over the micro-batch's units, 0-dim; None where there is none to train on.
        weight: the number of units, only from tasks whose weight is known after their forward (`late_weight`).
        metrics: further numbers as (sum, weight) pairs, such as `{"accuracy": (correct, total)}`; they are logged
            as Σsum/Σweight over micro-batches, updates and ranks, never as a mean of means.
        observed: input of the task's metric objects (`Task.metrics`): arguments of their `update` by name, such as
            `{"preds": scores, "target": labels}`, of which each metric gets those that it has; or arguments for one
            metric only, as a mapping under its name. A task with such metrics must give it.
        count: how many units `sum` covers, if the loss itself knows; `of_mean` sets it.
        shown: texts, images and histograms by name, such as `{"text": Text("once upon a time")}`, for writers that
            take them: "train/text", "valid/text". Of several under one name in an update the first is kept.
        counts: plain numbers by name, such as the matching n-grams of BLEU, that are summed over micro-batches and
            ranks for `Task.derived`, where each stands under its name. They are not logged.

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
    def of_mean(
        cls,
        mean: Tensor,
        count: Tensor | float,
        *,
        metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] | None = None,
        observed: Mapping[str, Any] | None = None,
        counts: Mapping[str, Tensor | float] | None = None,
    ) -> Self:
        """The loss of a model that gives a mean: its sum is mean · count, exactly what the mean was divided by.

        `count` must be the number of units that the mean is over, and so must be what `Task.weight` gives for the
        batch: the update divides by the sum of weights. With `late_weight` it is the weight. Models of `transformers`
        give a mean over the labels that are not -100; causal ones shift them first, so that the first label of each
        row does not count: `(labels[:, 1:] != -100).sum()`, both here and in `weight`.

        Args:
            mean: over the batch's units, 0-dim. Of no units it is taken for 0, also where it is NaN. On an
                accelerator, whose numbers nobody waits for, its gradient must be finite then: where the weight is late,
                divide by `count.clamp(min=1)`.
            count: of these units.
            metrics: see `Loss`.
            observed: see `Loss`.
            counts: see `Loss`.

        >>> import torch
        >>> Loss.of_mean(torch.tensor(1.5), 4).sum
        tensor(6.)
        """
        wide = mean.float() if mean.dtype in (torch.float16, torch.bfloat16) else mean
        given = scalar_on(count, wide.device, wide.dtype)
        total = torch.where(given > 0, wide, torch.zeros_like(wide)) * given
        return cls(total, metrics=dict(metrics or {}), observed=observed, count=count, counts=dict(counts or {}))


class Task(ABC):
    """Inputs, weight, loss and metrics of a batch. Subclass it and write `loss`, and more if needed.

    The gradient of an update over micro-batches m with summed losses S_m and weights w_m is Σ∇S_m / Σw_m: per sample,
    per token, per whatever `weight` counts, whichever way the batches are cut into micro-batches. With several tasks it
    is the sum of that over tasks, each times its coefficient.

    Attributes:
        late_weight: True when the weight is known only after the forward (masked positions chosen inside the
            model); `loss` must then give it, and `weight` is not called.
        metrics: objects of torchmetrics by name, or a `MetricCollection`, for metrics that are no pair (sum, weight),
            such as F1 or AUROC. They are updated with the `observed` of `loss`, and computed over all ranks and all
            updates since metrics were last written. The objects are copied; the given ones are not changed.
        derived: metrics that are functions of the others by name, such as `{"ppl": lambda metrics:
            math.exp(metrics["loss"])}`: of their means over all micro-batches and ranks, and of the sums of
            `Loss.counts`, in training and evaluations.
        unit: what its weight counts, such as "tokens": then `progress/tokens` and `perf/tokens_per_s` are metrics.
            Without it they are called `progress/weight` and `perf/weight_per_s`.
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
        """Number of the update, whether it trains, and outputs of the average, for `loss` and other methods.

        It is that of the trainer or engine that the task was given to last. Outside of one its properties raise
        TaskError.
        """
        return vars(self).get(NOW) or Now()

    def prepare(self, model: nn.Module) -> None:
        """Look at the model that is about to be trained: called once for each trainer or engine, before any batch.

        The model is whole, on every rank, and neither moved nor wrapped; of a model in stages each rank has its own.
        Nothing is done by default.

        Raises:
            ArgumentError: the task is not for such a model; whoever overrides this says what to do.
        """

    def transform(self, batch: Any) -> Any:
        """Change a batch on the model's device, before its forward and outside autocast; unchanged by default.

        Random numbers drawn here are keyed as those of the forward are.
        """
        return batch

    def inputs(self, batch: Any) -> Any:
        """Arguments of the model: a tuple is its positional, a dict or `UserDict` its keyword arguments, all
        else its only argument. By default the first item of a list or tuple, else the batch itself.
        """
        return batch[0] if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence) else batch

    def postprocess(self, output: Any, batch: Any) -> Any:
        """The output as `loss` sees it, such as with what `transform` did undone; unchanged by default."""
        return output

    def weight(self, batch: Any) -> float | Tensor:
        """Number of units that the summed loss of `batch` covers: valid tokens, samples, boxes.

        Called before the forward, with the batch as the loader gave it (on the CPU). By default its number of
        samples: as many as the loader has put in, unless its tensors say something else; where the loader does not
        know, dim 0 of all its tensors. A micro-batch of weight 0 contributes nothing and is not run. Where its loss is
        not 0, as that of images without boxes, set `late_weight`: then it is run. The first one that comes is looked at
        (`check_loss`), and such a loss is refused.

        Raises:
            TaskError: that is not certain.
        """
        return default_weight(self, batch)

    def evaluate(self, model: nn.Module, batch: Any) -> "Loss | Tensor | None":
        """Evaluate a batch: by default the loss of the model's output, as in training.

        Override it to generate with the model, instead of or beside its loss:

            def evaluate(self, model, batch):
                texts = model.generate(batch["source"])
                edits, words = compare(texts, batch["target"])
                return Loss(None, metrics={"wer": (edits, words)})

        Called in evaluation mode and without gradients, with the model as the trainer was given it, and the batch as
        `transform` gave it. `Loss(None)` is then no loss, and there is no `valid/loss`; for one beside the metrics,
        compute it, as this does. Each rank calls it for its own micro-batches, so it must ask nothing of other ranks.
        Shards of `fsdp` are gathered before it, and stages put together, so memory must suffice for the whole model.
        """
        positional, named = arguments((), self.inputs(batch), True)
        return self.loss(self.postprocess(model(*positional, **named), batch), batch)

    def predict(self, output: Any, batch: Any) -> Any:
        """Prediction that `Trainer.predict` keeps of the model's output: any tree of tensors; by default the output.

        Called instead of `loss`, on the model's device; the less it gives, the less is copied, sent and held.
        """
        return output

    def split(self, batch: Any) -> list[Any]:
        """`batch` in two, because it did not fit into memory; in one, if it can't be cut.

        The weights, and the summed losses, of the parts must add up to those of the whole. By default tensors and
        arrays with a row for each sample are cut along their first dimension, and lists of samples in samples; a tensor
        that all samples share goes to both parts. A batch that can be read in two ways is not cut. Override it where
        samples are not along the first dimension: features first, graphs, your own classes.
        """
        return halves(batch)

    def state_dict(self) -> dict[str, Any]:
        """State of this task for checkpoints: a tree of dict, list, str, int, float, bool, None and tensors.

        By default nothing, or what another base class has, such as an `nn.Module`; what is trained of that is saved
        with the model. It must not depend on which
        micro-batches this rank has run: the first rank's is kept, and given to all.
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

        None, or a tensor without elements, is a loss of 0: the batch's weight counts, and so does that it had none. The
        only task of a run says `Loss(None)` for that, as None would more likely be a forgotten `return`.
        """


def evaluates_itself(task: Task) -> bool:
    """True for tasks that override `evaluate`.

    >>> Squares = type("Squares", (Task,), {"loss": lambda self, output, batch: (output**2).sum()})
    >>> evaluates_itself(Squares()), evaluates_itself(type("Own", (Squares,), {"evaluate": len})())
    (False, True)
    """
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
    """Default of `Task.weight`: the number of samples of `batch`.

    Args:
        batch: as the loader gave it.
        known: how many samples were put in, where that is known.

    Raises:
        TaskError: that is not certain.
    """
    samples = num_samples(batch, known)
    if samples is None:
        put_in = "" if known is None else f", of which the loader made {known} samples"
        raise TaskError(
            f"the default `weight` of {type(task).__name__} counts samples, but a batch does not tell how many it "
            f"holds: {contents(batch)}{put_in}; override `weight` to say how many units the loss of a batch covers, "
            f"such as `return len(batch[{_place_of_labels(batch)}])`.",
            field="weight",
        )
    return samples


def _place_of_labels(batch: Any) -> str:
    return repr(str(next(reversed(batch)))) if isinstance(batch, dict) and batch else "1"


def weight_of(task: Task, data: object, what: str | int, num_samples: int | None = None) -> float:
    """The weight that `task` gives a batch.

    Args:
        what: what messages call the batch, or the number of the micro-batch that it is.
        num_samples: how many samples were put into it, where that is known.

    Raises:
        TaskError: it is negative, not finite, or not a number.
    """
    by_default = getattr(task.weight, "__func__", None) is Task.weight
    given = default_weight(task, data, num_samples) if by_default else task.weight(data)
    try:
        if isinstance(cast("object", given), str | bytes):
            raise TypeError("it is text")  # which float() reads
        weight = float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give a number or a 0-dim tensor, but gave {type(given).__name__} for "
            f"{_called(what)}: {error}"
        ) from error
    if not 0 <= weight <= _LARGEST:
        raise TaskError(
            f"`{type(task).__name__}.weight` must give a finite number of at least 0, and at most {_LARGEST:g}, but "
            f"gave {weight} for {_called(what)}; it is the number of units that the summed loss covers."
        )
    return weight


def _called(what: str | int) -> str:
    return what if isinstance(what, str) else f"micro-batch {what}"
