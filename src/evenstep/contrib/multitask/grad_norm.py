"""Coefficients learned so that all tasks' gradients are as long as their pace of learning asks for.

With G_t = λ_t · ‖∇L_t‖ over the shared parameters, Ḡ their mean, r_t = (L_t / L_t(first)) / mean of those, and the
target Ḡ · r_t^α taken as a constant,

    λ_t ← λ_t - η · sign(G_t - Ḡ · r_t^α) · ‖∇L_t‖,  then scaled so that the λ_t sum to what they did

A task that learns slowly gets more. The λ_t of an update are those from before it.

Reference: Chen et al., "GradNorm: gradient normalization for adaptive loss balancing in deep multitask networks",
ICML 2018, algorithm 1.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import final

import torch
from torch import Tensor, nn

from evenstep.arguments import require_names, require_number
from evenstep.schema import NonNegative, Positive
from evenstep.train.tasks.weighting import Combine, TaskWeights

_SMALLEST = 1e-3


@final
class GradNorm(Combine):
    """Coefficients from gradient norms.

    Args:
        alpha: α, how strongly slow tasks are favoured; 0 makes all gradients equally long.
        coefficient_lr: η, how fast the coefficients move.
        parameters: patterns of the names of the shared parameters whose gradients are measured, such as
            `("trunk.4.*",)` for the last shared layer; all shared ones by default.

    Raises:
        ArgumentError: a number out of its range.

    >>> method = GradNorm(coefficient_lr=0.1)
    >>> _ = method.build(("a", "b"))
    >>> products = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64)  # ‖∇L_a‖ = 2, ‖∇L_b‖ = 1
    >>> for update in (1, 2):
    ...     shares = method(products, [1.0, 1.0], tasks=("a", "b"), seed=1, update=update)
    >>> [round(share, 3) for share in shares.shared]  # 1 - 0.2 and 1 + 0.1, scaled to sum to 2
    [0.842, 1.158]
    """

    def __init__(
        self, *, alpha: NonNegative = 1.5, coefficient_lr: Positive = 0.025, parameters: Sequence[str] = ("*",)
    ) -> None:
        require_number("alpha", alpha, "[0, inf)", "finite and at least 0", "0.5 to 1.5 is usual")
        require_number("coefficient_lr", coefficient_lr, "(0, inf)", "finite and above 0", "")
        self._alpha = alpha
        self._coefficient_lr = coefficient_lr
        self._parameters = require_names("parameters", parameters, "`parameters=('trunk.4.*',)`")
        self._tasks: tuple[str, ...] = ()
        self._learned = nn.Identity()  # as a model that runs all of its parts runs this as well

    def build(self, tasks: Sequence[str]) -> nn.Module | None:
        self._tasks = tuple(tasks)
        self._learned = nn.Identity()
        self._learned.register_buffer("coefficients", torch.ones(len(tasks)))  # λ_t; buffers go into checkpoints
        self._learned.register_buffer("first_losses", torch.zeros(len(tasks)))  # 0 before it comes
        return self._learned

    def looks_at(self, parameter: str) -> bool:
        return any(fnmatchcase(parameter, pattern) for pattern in self._parameters)

    def __call__(
        self, products: Tensor, losses: Sequence[float], *, tasks: Sequence[str], seed: int, update: int
    ) -> TaskWeights:
        places = [self._tasks.index(name) for name in tasks]
        coefficients, first_losses = (self._learned.get_buffer(name) for name in ("coefficients", "first_losses"))
        every, first = coefficients.tolist(), first_losses.tolist()
        now = [every[place] for place in places]
        for place, loss in zip(places, losses, strict=True):
            first[place] = first[place] or loss
        moved = self._moved(now, products.diagonal().sqrt().tolist(), losses, [first[place] for place in places])
        for place, value in zip(places, moved, strict=True):
            every[place] = value
        with torch.no_grad():
            coefficients.copy_(torch.tensor(every))
            first_losses.copy_(torch.tensor(first))
        return TaskWeights(shared=now, own=now)

    def _moved(
        self, now: list[float], norms: list[float], losses: Sequence[float], first: Sequence[float]
    ) -> list[float]:
        count = len(now)
        lengths = [share * norm for share, norm in zip(now, norms, strict=True)]
        mean = sum(lengths) / count
        paces = [loss / begin if begin > 0 and loss >= 0 else 1.0 for loss, begin in zip(losses, first, strict=True)]
        mean_pace = sum(paces) / count or 1.0
        # a tensor's power is infinite where a number's raises OverflowError
        powers = torch.tensor([pace / mean_pace for pace in paces], dtype=torch.float64).pow(self._alpha).tolist()
        targets = [mean * power for power in powers]
        lr = self._coefficient_lr
        raw = [
            max(share - lr * (math.copysign(1.0, length - target) if length != target else 0.0) * norm, _SMALLEST)
            for share, length, target, norm in zip(now, lengths, targets, norms, strict=True)
        ]
        return [value * sum(now) / sum(raw) for value in raw]
