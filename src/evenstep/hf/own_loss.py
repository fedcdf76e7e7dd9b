"""Whether a model's own loss is the one that is trained: what else it adds would be left out, which is said.

Models give their loss where they get labels: for nearly all, the mean over tokens that these tasks sum. Which do is
tried on some tokens, not looked up. Where labels are shifted is the task's to say.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from evenstep.hf.columns import IGNORED
from evenstep.hf.trial import rounding_of, tried
from evenstep.internals import unwrapped


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

    if (found := tried(model, losses)) is None:  # as where it takes no labels, or has no loss of its own
        return
    own, trained, rounding = found
    if all(abs(own - one) > rounding * abs(one) for one in trained):
        logging.getLogger("evenstep").warning(
            f"the own loss of {type(unwrapped(model)).__name__}, on some tokens, is {own:.6g}, but the mean over "
            f"tokens that `{name}` trains is {trained[0]:.6g}: what else the model's loss has is left out. To train "
            f"it, write a task that gives the model its labels and returns `Loss.of_mean(output.loss, count)`."
        )


def _mean(scores: Tensor, targets: Tensor) -> float:
    return float(functional.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED))
