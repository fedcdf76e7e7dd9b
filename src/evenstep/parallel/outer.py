"""The outer optimizer of ranks that step alone: what the mean of their parameters does to those that they share.

With θ the shared parameters, m the mean of the ranks' own, γ = 1 or the inner learning rate, μ the momentum and η the
outer rate, one outer step is

    Δ = θ - m                                  the outer gradient
    v ← μ·v + Δ/γ                              v = 0 before the first
    θ ← θ - η·γ·v                              or, with `nesterov`, θ - η·γ·(Δ/γ + μ·v)

(for SlowMo lines 7 and 8 of the paper's algorithm 1, its equations 2 and 3; for DiLoCo line 14 of algorithm 1), which
for η = 1 and μ = 0 is m itself, and computed as such. Where γ is 0 (a rate that has fallen to 0 since the last share)
the step is its limit: θ - η·Δ, or with `nesterov` θ - η·(1 + μ)·Δ, and v ← μ·v. It does not communicate, and it does
not choose when.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from evenstep.arguments import require_flag, require_number
from evenstep.errors import ArgumentError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """SGD with momentum on the outer gradient.

    Args:
        outer_lr: η above, above 0; 1.0 takes the mean.
        outer_momentum: μ above, in [0, 1).
        nesterov: whether the step looks ahead; needs momentum.
        by_inner_rate: whether γ is the inner learning rate of a parameter's group at the update that shares, as SlowMo
            has it; else it is 1. They differ only where that rate changes; needs momentum.

    Raises:
        ArgumentError: a number out of its range.

    >>> import torch
    >>> shared, mean, momentum = torch.ones(1), torch.zeros(1), torch.zeros(1)
    >>> Outer(outer_lr=0.5, outer_momentum=0.9, nesterov=True).step(shared, mean, momentum, rate=1.0)
    >>> round(shared.item(), 4), momentum.item()
    (0.05, 1.0)
    """

    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    by_inner_rate: bool = False

    def __post_init__(self) -> None:
        rate, share = self.outer_lr, self.outer_momentum
        require_number("outer_lr", rate)
        require_number("outer_momentum", share)
        require_flag("nesterov", self.nesterov)
        require_flag("by_inner_rate", self.by_inner_rate)
        if not 0 < rate < math.inf:
            raise ArgumentError(f"`outer_lr` must be a finite number above 0, but is {rate}; 1.0 takes the mean.")
        if not 0 <= share < 1:
            raise ArgumentError(f"`outer_momentum` must be in [0, 1), but is {share}; 0.9 is usual.")
        for name in ("nesterov", "by_inner_rate"):
            if getattr(self, name) and not share:
                raise ArgumentError(
                    f"`{name}` is about the outer momentum, but `outer_momentum` is 0; set one, or leave it out."
                )

    @property
    def has_momentum(self) -> bool:
        """Whether it keeps a v for each parameter."""
        return self.outer_momentum > 0

    def step(self, shared: Tensor, mean: Tensor, momentum: Tensor | None, *, rate: float) -> None:
        """Move `shared`, in place; `mean` is used up.

        Args:
            mean: of the ranks' own, of the format of `shared`.
            momentum: v above, in place; None where it keeps none.
            rate: the inner learning rate.
        """
        if momentum is None:
            shared.copy_(mean) if self.outer_lr == 1.0 else shared.lerp_(mean, self.outer_lr)
            return
        gamma = rate if self.by_inner_rate else 1.0
        gradient = mean.neg_().add_(shared)
        momentum.mul_(self.outer_momentum)
        if not gamma:  # since the last share ranks have moved all the same, if the rate has fallen to 0 in between
            shared.add_(gradient, alpha=-self.outer_lr * (1 + self.outer_momentum * self.nesterov))
            return
        momentum.add_(gradient, alpha=1 / gamma)
        if self.nesterov:
            shared.add_(gradient, alpha=-self.outer_lr)
            shared.add_(momentum, alpha=-self.outer_lr * gamma * self.outer_momentum)
        else:
            shared.add_(momentum, alpha=-self.outer_lr * gamma)


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The places of neighbouring parameters of these sizes in `count` fragments of nearly equal size, none empty.

    >>> fragments_of([4, 1, 2, 5], 2)
    [[0, 1, 2], [3]]
    """
    total, fragments, before = sum(sizes), [[0]], 0
    for place in range(1, len(sizes)):
        before += sizes[place - 1]
        left, wanted = len(sizes) - place, count - len(fragments)
        if wanted and (before + sizes[place] / 2 > total * len(fragments) / count or left == wanted):
            fragments.append([])
        fragments[-1].append(place)
    return fragments
