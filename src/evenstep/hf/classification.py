"""Classes of whole texts or of single tokens, several labels at once, and numbers."""

from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from evenstep.arguments import require_word
from evenstep.errors import TaskError
from evenstep.hf.outputs import batch_of, check_whole, logits_of, tensor_of
from evenstep.train import Loss, Task

Problem = Literal["single_label", "multi_label", "regression"]
IGNORED = -100


class Classification(Task):
    """What a model with a classification head is trained on: one class, several labels, or numbers.

    | `problem` | `labels` | loss, summed over labels |
    |---|---|---|
    | single_label | whole numbers `[rows]`, or `[rows, length]` for tokens; −100 is not counted | −log p(label) |
    | multi_label | 0 and 1 `[rows, classes]` | −Σ_c log p_c(label_c), each class by itself |
    | regression | numbers `[rows]` or `[rows, outputs]` | Σ (output − label)² |

    The weight of a batch is how many labels are counted, so that an update has their mean. Batches are mappings; all
    but `labels` is given to the model by its name.

    Args:
        problem: which of them; the model's `config.problem_type` is not asked.

    Raises:
        ArgumentError: another word.

    >>> import torch
    >>> task = Classification()
    >>> batch = {"input_ids": torch.zeros(3, 4, dtype=torch.long), "labels": torch.tensor([1, 0, -100])}
    >>> int(task.weight(batch))
    2
    """

    def __init__(self, *, problem: Problem = "single_label") -> None:
        require_word("problem", problem, get_args(Problem))
        self._problem = problem

    def prepare(self, model: nn.Module) -> None:
        check_whole(self, model)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """All of the batch but its labels, by name."""
        return {name: one for name, one in batch_of(self, batch).items() if name != "labels"}

    def weight(self, batch: Any) -> int | Tensor:
        """How many labels are counted."""
        labels = self._labels(batch)
        return (labels != IGNORED).sum() if self._problem == "single_label" else labels.numel()

    def loss(self, output: Any, batch: Any) -> Loss:
        """The summed loss, and of single labels the share of those that are right."""
        logits, labels = logits_of(self, output), self._labels(batch)
        if self._problem == "regression" and logits.shape == (*labels.shape, 1):
            labels = labels.unsqueeze(-1)
        wanted = logits.shape[:-1] if self._problem == "single_label" else logits.shape
        if labels.shape != wanted:
            raise TaskError(
                f"the model gives scores of shape {list(logits.shape)} for `labels` of shape {list(labels.shape)}, but "
                f"`{self._problem}` needs labels of shape {list(wanted)}; choose another `problem`, or another head."
            )
        if self._problem == "multi_label":
            return Loss(functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum"))
        if self._problem == "regression":
            return Loss(functional.mse_loss(logits, labels.to(logits.dtype), reduction="sum"))
        counts = labels != IGNORED
        right = (logits.argmax(-1) == labels) & counts
        nats = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(nats, metrics={"accuracy": (right.sum(), counts.sum())})

    def predict(self, output: Any, batch: Any) -> Tensor:
        """The scores."""
        return logits_of(self, output)

    def _labels(self, batch: Any) -> Tensor:
        labels = tensor_of(self, batch_of(self, batch), "labels", "give what is to be learned.")
        if self._problem == "single_label" and labels.is_floating_point():
            raise TaskError(
                "`labels` must be whole numbers for `single_label`, but are floating; convert them, or choose "
                "`problem='multi_label'` or `'regression'`."
            )
        return labels
