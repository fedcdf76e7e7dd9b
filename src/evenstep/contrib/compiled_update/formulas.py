"""The steps of torch's AdamW, Adam and SGD as formulas of tensors, to be compiled with what gives the gradient.

Rates and bias corrections are numbers that the host computes in float64, as torch's kernels do. The state has torch's
names and meaning. A formula gives parameter and state after the step, and changes nothing in place:

    kept            names of the tensors in the optimizer's state, in their order
    counts          True if the state has a `step`
    width           count of the numbers
    steps_taken     number of steps taken, as far as the next one depends on it
    numbers         numbers of the next step, from the group's options and the steps taken
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

FORMULAS = (AdamW, Adam, SGD)
"""The optimizers whose steps are written here; classes made of them may do anything else."""


@final
@dataclass(frozen=True, slots=True)
class AdamFormula:
    """m ← m + (1-β₁)(g-m),  v ← β₂v + (1-β₂)g²,  θ ← θ - lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε).

    Weight decay is before it: θ ← (1 - lr·λ)θ where it is decoupled (AdamW), else g ← g + λθ (Adam).

    >>> adam = Adam([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> formula = formula_of(adam, adam.param_groups[0]); formula.kept, formula.width
    (('exp_avg', 'exp_avg_sq'), 7)
    >>> numbers = [torch.tensor(one) for one in formula.numbers(adam.param_groups[0], 0)]
    >>> formula(torch.zeros(1), torch.ones(1), [torch.zeros(1), torch.zeros(1)], numbers)[0]
    tensor([-0.5000])
    """

    amsgrad: bool
    maximize: bool
    decoupled: bool

    counts = True
    width = 7

    @property
    def kept(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        return int(state["step"]) if "step" in state else 0

    def numbers(self, group: Mapping[str, Any], taken: int) -> list[float]:
        rate, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
        number = taken + 1
        return [
            1 - rate * decay if self.decoupled else decay,
            rate / (1 - beta1**number),
            math.sqrt(1 - beta2**number),
            1 - beta1,
            beta2,
            1 - beta2,
            group["eps"],
        ]

    def __call__(
        self, parameter: Tensor, gradient: Tensor, kept: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        decay, rate, root, share, keeps, takes, epsilon = numbers
        if self.maximize:
            gradient = -gradient
        if self.decoupled:
            parameter = parameter * decay
        else:
            gradient = gradient + decay * parameter
        first, second = kept[0], kept[1]
        first = first + share * (gradient - first)
        second = keeps * second + takes * gradient * gradient
        after = [first, second]
        if self.amsgrad:
            after.append(torch.maximum(kept[2], second))
        return parameter - rate * first / (after[-1].sqrt() / root + epsilon), after


@final
@dataclass(frozen=True, slots=True)
class SgdFormula:
    """g ← g + λθ,  b ← μb + (1-τ)g  (the first b is g),  θ ← θ - lr·b;  with nesterov  θ ← θ - lr·(g + μb)."""

    momentum: bool
    nesterov: bool
    maximize: bool

    counts = False
    width = 5

    @property
    def kept(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        return 0 if state.get("momentum_buffer") is None else 1

    def numbers(self, group: Mapping[str, Any], taken: int) -> list[float]:
        rate, decay = float(group["lr"]), group["weight_decay"]
        # of the first step there is no momentum yet; all later ones are alike
        momentum, dampening = (group["momentum"], group["dampening"]) if taken else (0.0, 0.0)
        return [decay, momentum, 1 - dampening, group["momentum"], rate]

    def __call__(
        self, parameter: Tensor, gradient: Tensor, kept: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        decay, keeps, takes, momentum, rate = numbers
        if self.maximize:
            gradient = -gradient
        gradient = gradient + decay * parameter
        if not self.momentum:
            return parameter - rate * gradient, []
        moved = keeps * kept[0] + takes * gradient
        gradient = gradient + momentum * moved if self.nesterov else moved
        return parameter - rate * gradient, [moved]


Formula: TypeAlias = AdamFormula | SgdFormula


def formula_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Formula:
    """The formula of the parameters of a group, as its options are now; equal where they are.

    Args:
        optimizer: of a class among `FORMULAS`.

    >>> sgd = SGD([torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.9)
    >>> formula_of(sgd, sgd.param_groups[0])
    SgdFormula(momentum=True, nesterov=False, maximize=False)
    """
    maximize = bool(group["maximize"])
    if isinstance(optimizer, SGD):
        return _sgd(bool(group["momentum"]), bool(group["nesterov"]), maximize)
    decoupled = isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
    return _adam(bool(group["amsgrad"]), maximize, decoupled)


_sgd, _adam = cache(SgdFormula), cache(AdamFormula)  # asked for in each update
