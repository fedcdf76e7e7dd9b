"""The steps of torch's AdamW, Adam and SGD as formulas of tensors, to be compiled with what gives the gradient.

What changes from update to update (rates, bias corrections) comes in as numbers, computed on the host in float64 as
torch's kernels do; what is chosen once (amsgrad, nesterov, …) is a field. The state has torch's names and meaning, so
an optimizer may be stepped by these formulas, by its own `step`, and by these again. It steps nothing by itself.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

FORMULAS = (AdamW, Adam, SGD)
"""The optimizers whose steps are written here; classes made of them may do anything else."""


class Formula(ABC):
    """The step of the parameters of one group.

    Attributes:
        kept: the names of the tensors in the optimizer's state that have the parameter's shape.
        counts: whether the state has a `step`, too.
        width: of how many numbers the step is made, beside tensors.
    """

    kept: tuple[str, ...]
    counts: bool
    width: int

    @abstractmethod
    def steps_taken(self, state: Mapping[str, Any]) -> int:
        """How many steps a parameter has taken, as far as the next one depends on that."""

    @abstractmethod
    def numbers(self, group: Mapping[str, Any], taken: int) -> list[float]:
        """What the next step of a group's parameters is made of, `width` numbers.

        Args:
            group: its options as they are now.
            taken: how many steps have been taken.
        """

    @abstractmethod
    def __call__(
        self, parameter: Tensor, gradient: Tensor, kept: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The parameter and its state after the step; nothing is changed in place.

        Args:
            kept: its state, in the order of the names.
            numbers: as `numbers` gave them, each 0-dim.
        """


@final
@dataclass(frozen=True, slots=True)
class AdamFormula(Formula):
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
    def kept(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
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
class SgdFormula(Formula):
    """g ← g + λθ,  b ← μb + (1-τ)g  (the first b is g),  θ ← θ - lr·b;  with nesterov  θ ← θ - lr·(g + μb)."""

    momentum: bool
    nesterov: bool
    maximize: bool

    counts = False
    width = 5

    @property
    def kept(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
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
