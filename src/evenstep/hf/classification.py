"""Classes of whole texts or of single tokens, several labels at once, and numbers."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.arguments import require_word
from evenstep.errors import ArgumentError, TaskError
from evenstep.hf.columns import IGNORED, without_cache
from evenstep.hf.outputs import batch_of, check_whole, logits_of, tensor_of, weights_of
from evenstep.train import Loss, Task

Problem = Literal["single_label", "multi_label", "regression"]


class Classification(Task):
    """What a model with a classification head is trained on: one class, several labels, or numbers.

    | `problem` | `labels` | loss, summed over labels |
    |---|---|---|
    | single_label | whole numbers `[rows]`, or `[rows, length]` for tokens; −100 is not counted | −log p(label) |
    | multi_label | 0 and 1 `[rows, classes]` | −Σ_c log p_c(label_c), each class by itself |
    | regression | numbers `[rows]` or `[rows, outputs]` | Σ (output − label)² |

    The weight of a batch is how many labels are counted, so that an update has their mean. Batches are mappings; all
    but `labels` and, if there are some, their `weights` is given to the model by its name. Weights, of the labels'
    shape, count a label more or less, in the loss and in the batch's weight.

    Args:
        problem: which of them; the model's `config.problem_type` is not asked.
        label_smoothing: ε: the target of a single label is (1 − ε) on it and ε spread evenly over the classes.

    Raises:
        ArgumentError: another word, or choices that do not go together.

    >>> import torch
    >>> task = Classification()
    >>> batch = {"input_ids": torch.zeros(3, 4, dtype=torch.long), "labels": torch.tensor([1, 0, -100])}
    >>> int(task.weight(batch))
    2
    """

    def __init__(self, *, problem: Problem = "single_label", label_smoothing: float = 0.0) -> None:
        require_word("problem", problem, get_args(Problem))
        if label_smoothing and problem != "single_label":
            raise ArgumentError(
                f"`label_smoothing` is for single labels, but `problem` is {problem!r}; leave it out.",
                field="label_smoothing",
            )
        self._problem, self._label_smoothing = problem, float(label_smoothing)
        self._more = dict[str, bool]()

    def prepare(self, model: nn.Module) -> None:
        check_whole(self, model)
        self._more = without_cache(model)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """All of the batch but labels and weights, by name; decoders keep no keys and values for generation."""
        given = batch_of(self, batch)
        return self._more | {name: one for name, one in given.items() if name not in ("labels", "weights")}

    def weight(self, batch: Any) -> int | Tensor:
        """How many labels are counted, or the sum of their weights."""
        labels, weights = self._labels(batch)
        counts = labels != IGNORED if self._problem == "single_label" else torch.ones_like(labels, dtype=torch.bool)
        return counts.sum() if weights is None else weights.double().mul(counts).sum()

    def loss(self, output: Any, batch: Any) -> Loss:
        """The summed loss, and of single labels the share of those that are right."""
        logits, (labels, weights) = logits_of(self, output), self._labels(batch)
        if self._problem == "regression" and logits.shape == (*labels.shape, 1):
            labels = labels.unsqueeze(-1)
        wanted = logits.shape[:-1] if self._problem == "single_label" else logits.shape
        if labels.shape != wanted:
            raise TaskError(
                f"`labels` must be of shape {list(wanted)} for `{self._problem}`, but are of shape "
                f"{list(labels.shape)}; choose another `problem` or head."
            )
        if self._problem == "single_label" and logits.shape[-1] == 1:
            raise TaskError("`single_label` needs two classes or more, but the model has one; set its `num_labels`.")
        reduction = "sum" if weights is None else "none"
        if self._problem == "multi_label":
            losses = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
        elif self._problem == "regression":
            losses = functional.mse_loss(logits, labels.to(logits.dtype), reduction=reduction)
        else:
            losses = functional.cross_entropy(
                logits.flatten(0, -2),
                labels.flatten(),
                ignore_index=IGNORED,
                label_smoothing=self._label_smoothing,
                reduction=reduction,
            )
        total = losses if weights is None else losses.flatten().mul(weights.flatten()).sum()
        if self._problem != "single_label":
            return Loss(total)
        counts = labels != IGNORED
        right = (logits.argmax(-1) == labels) & counts
        return Loss(total, metrics={"accuracy": (right.sum(), counts.sum())})

    def predict(self, output: Any, batch: Any) -> Tensor:
        """The scores."""
        return logits_of(self, output)

    def _labels(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        labels = tensor_of(self, batch_of(self, batch), "labels", "give what is to be learned.")
        return labels, weights_of(self, batch, labels)
