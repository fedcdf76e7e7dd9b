"""Coefficients learned with the model: each task's own noise decides how much it counts.

With s_t = log σ_t² a parameter of each task, and κ_t = 1 (classification) or ½ (regression), the loss is

    Σ_t κ_t · exp(-s_t) · L_t + s_t / 2

so a task whose loss stays large counts less, and the s_t / 2 keeps σ_t from growing for ever. The parameters are the
model's: saved, averaged, clipped, reduced over ranks and optimised with the rest, without weight decay. A task without
work leaves its s_t as it is.

Reference: Kendall, Gal, Cipolla, "Multi-task learning using uncertainty to weigh losses for scene geometry and
semantics", CVPR 2018, equations 7 to 10.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from evenstep.arguments import require_names
from evenstep.train.tasks.weighting import Coefficients, check_tasks

_NAME = "log_variance_{}"


@final
class Uncertainty(Coefficients):
    """Learned coefficients κ_t · exp(-s_t).

    Args:
        regression: the tasks whose loss is a squared error; all others are taken for likelihoods.

    >>> coefficients = Uncertainty(regression=("box",))
    >>> module = coefficients.build(("class", "box"))
    >>> coefficients.weighted("box", torch.tensor(4.0), 1.0).item()  # ½ · exp(0) · 4 + 0 / 2
    2.0
    """

    def __init__(self, *, regression: Sequence[str] = ()) -> None:
        self._regression = frozenset(require_names("regression", regression, "`regression=('box',)`"))
        self._log_variances = nn.Identity()  # as a model that runs all of its parts runs this as well

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        check_tasks(dict.fromkeys(self._regression, None), tasks)
        self._log_variances = nn.Identity()
        for name in tasks:  # one 0-dim parameter each, so that those without work have no gradient
            self._log_variances.register_parameter(_NAME.format(name), nn.Parameter(torch.zeros(())))
        return self._log_variances

    def weighted(self, task: str, loss: Tensor, share: float | Tensor) -> Tensor:
        log_variance = self._log_variances.get_parameter(_NAME.format(task))
        kappa = 0.5 if task in self._regression else 1.0
        return kappa * (-log_variance).exp() * loss + 0.5 * share * log_variance
