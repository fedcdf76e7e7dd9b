"""Whether a model's own loss is the one that is trained: what else it adds would be left out, which is said.

Models give their loss where they get labels: for nearly all, the mean over tokens or labels that these tasks sum. Which
do is tried on some tokens, not looked up. Where labels are shifted is the task's to say.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.errors import TaskError
from evenstep.hf.columns import IGNORED
from evenstep.hf.trial import rounding_of, tried
from evenstep.internals import unwrapped

_PROBLEMS = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def compare_own_loss(name: str, model: nn.Module, targets_of: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
    """Warn if a model's own loss of some tokens, in evaluation mode, is not the mean that a task trains.

    Args:
        name: of the task.
        targets_of: what each row of scores of a batch must give, −100 where that is not counted.
    """

    def losses(tokens: Tensor, weight: Tensor) -> tuple[float, list[float], float]:
        batch = {"input_ids": tokens.unsqueeze(0), "labels": tokens.flip(0).unsqueeze(0)}
        output: Any = model(**batch, use_cache=False)
        scores = output["logits"].float().flatten(0, -2)
        trained = [_mean(scores, one) for one in (targets_of(batch), batch["labels"])]  # some shift no labels
        return float(output["loss"]), trained, rounding_of(weight) ** 0.75

    _say(name, model, tried(model, losses), "tokens")


def compare_own_classes(name: str, model: nn.Module, problem: str) -> None:
    """The same of a model with a classification head, whose own loss is a mean over labels.

    Args:
        problem: as of a `Classification`.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "problem_type", None)

    def losses(tokens: Tensor, weight: Tensor) -> tuple[float, list[float], float]:
        batch = {"input_ids": tokens.unsqueeze(0)}
        scores = cast("Any", model)(**batch)["logits"]
        shape = scores.shape[:-1] if problem == "single_label" else scores.shape
        labels = torch.arange(shape.numel(), device=scores.device).view(shape)
        wide = scores.float()
        if problem == "single_label":
            if scores.shape[-1] == 1:
                raise TaskError("one class is refused with the first batch")
            labels = labels % scores.shape[-1]
            trained = _mean(wide.flatten(0, -2), labels)
        else:
            labels = (labels % 2).to(scores.dtype)
            of = functional.mse_loss if problem == "regression" else functional.binary_cross_entropy_with_logits
            trained = float(of(wide, labels.float()))
        own: Any = cast("Any", model)(**batch, labels=labels)
        return float(own["loss"]), [trained], rounding_of(weight) ** 0.75

    try:
        if config is not None and kind is None:  # where they would guess it from the labels, and note it there
            config.problem_type = _PROBLEMS[problem]
        found = tried(model, losses)
    finally:
        if config is not None and getattr(config, "problem_type", None) is not kind:
            config.problem_type = kind
    _say(name, model, found, "labels")


def _say(name: str, model: nn.Module, found: tuple[float, list[float], float] | None, units: str) -> None:
    """Warn if none of the means that a task may train is the own loss; None: it is not known."""
    if found is None:  # as where it takes no labels, or has no loss of its own
        return
    own, trained, rounding = found
    if all(abs(own - one) > rounding * abs(one) for one in trained):
        logging.getLogger("evenstep").warning(
            f"the own loss of {type(unwrapped(model)).__name__}, on some tokens, is {own:.6g}, but the mean over "
            f"{units} that `{name}` trains is {trained[0]:.6g}: what else the model's loss has is left out. To train "
            f"it, write a task that gives the model its labels and returns `Loss.of_mean(output.loss, count)`."
        )


def _mean(scores: Tensor, targets: Tensor) -> float:
    return float(functional.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED))
