"""The steps of torch's AdamW, Adam and SGD as formulas of tensors, to be compiled with the gradient.

Rates and bias corrections are numbers that the host computes in float64, as torch's kernels do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

FORMULAS = (AdamW, Adam, SGD)
"""The optimizers whose steps are written here; classes made of them may do anything else."""

_Stepped: TypeAlias = tuple[Tensor, list[Tensor]]  # the parameter and its state after a step


@final
@dataclass(frozen=True, slots=True)
class AdamFormula:
    """m ← m + (1-β₁)(g-m),  v ← β₂v + (1-β₂)g²,  θ ← θ - lr/(1-β₁ᵗ) · m / (√v/√(1-β₂ᵗ) + ε).

    Weight decay is before it: θ ← (1 - lr·λ)θ where it is decoupled (AdamW), else g ← g + λθ (Adam).
    """

    kept: tuple[str, ...]
    maximize: bool
    decoupled: bool

    width = 7

    def lacks(self, state: Mapping[str, Any]) -> bool:
        return any(state.get(name) is None for name in ("step", *self.kept))

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

    def step(self, parameter: Tensor, gradient: Tensor, kept: Sequence[Tensor], numbers: Sequence[Tensor]) -> _Stepped:
        decay, rate, root, share, keeps, takes, epsilon = numbers
        if self.maximize:
            gradient = -gradient
        if self.decoupled:
            parameter = parameter * decay
        else:
            gradient = gradient + decay * parameter
        first = kept[0] + share * (gradient - kept[0])
        second = keeps * kept[1] + takes * gradient * gradient
        after = [first, second]
        if len(kept) > 2:
            after.append(torch.maximum(kept[2], second))
        return parameter - rate * first / (after[-1].sqrt() / root + epsilon), after


@final
@dataclass(frozen=True, slots=True)
class SgdFormula:
    """g ← g + λθ,  b ← μb + (1-τ)g,  θ ← θ - lr·b;  with nesterov  θ ← θ - lr·(g + μb)."""

    kept: tuple[str, ...]
    maximize: bool
    nesterov: bool

    width = 4

    def lacks(self, state: Mapping[str, Any]) -> bool:
        return bool(self.kept) and state.get("momentum_buffer") is None

    def steps_taken(self, state: Mapping[str, Any]) -> int:
        return 0

    def numbers(self, group: Mapping[str, Any], taken: int) -> list[float]:
        return [group["weight_decay"], group["momentum"], 1 - group["dampening"], float(group["lr"])]

    def step(self, parameter: Tensor, gradient: Tensor, kept: Sequence[Tensor], numbers: Sequence[Tensor]) -> _Stepped:
        decay, momentum, takes, rate = numbers
        if self.maximize:
            gradient = -gradient
        gradient = gradient + decay * parameter
        if not kept:
            return parameter - rate * gradient, []
        moved = momentum * kept[0] + takes * gradient
        gradient = gradient + momentum * moved if self.nesterov else moved
        return parameter - rate * gradient, [moved]


Formula: TypeAlias = AdamFormula | SgdFormula


def formula_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Formula:
    """The formula of the parameters of a group of an optimizer among `FORMULAS`, as its options are now."""
    maximize = bool(group["maximize"])
    if isinstance(optimizer, SGD):
        return SgdFormula(("momentum_buffer",) if group["momentum"] else (), maximize, bool(group["nesterov"]))
    kept = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    return AdamFormula(kept, maximize, isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay")))


@final
class OptimizerState:
    """State of an optimizer among `FORMULAS`, by the number of each parameter in the order of the groups.

    Attributes:
        version: another number whenever tensors or `rows` may have changed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.parameters: list[nn.Parameter] = [one for group in optimizer.param_groups for one in group["params"]]
        self._group_of = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self.version = 0
        self._last: tuple[int, ...] = ()
        self.read()

    def read(self) -> None:
        """Read state and step counts of the optimizer."""
        state = self._optimizer.state
        self._formulas = self._formulas_now()
        self._states: list[dict[str, Any]] = [state.get(one, {}) for one in self.parameters]
        self._standing = list(state.values())
        self._taken = [self._formula(one).steps_taken(held) for one, held in enumerate(self._states)]
        self._lacking = {one for one, held in enumerate(self._states) if self._formula(one).lacks(held)}
        self.version += 1

    def follow(self) -> None:
        """Read the optimizer again if its state was replaced or its options were changed."""
        standing = self._optimizer.state.values()
        is_same = len(standing) == len(self._standing) and all(map(is_, standing, self._standing))
        if not is_same or self._formulas_now() != self._formulas:
            self.read()

    def _formulas_now(self) -> list[Formula]:
        return [formula_of(self._optimizer, group) for group in self._optimizer.param_groups]

    def _formula(self, one: int) -> Formula:
        return self._formulas[self._group_of[one]]

    def lacks(self, own: Sequence[int]) -> bool:
        """True if some parameters have no state yet, since they were never stepped."""
        return not self._lacking.isdisjoint(own)

    def committed(self, own: tuple[int, ...]) -> None:
        """Count a step of some parameters."""
        if own != self._last:  # some have taken more steps than others now
            self._last = own
            self.version += 1
        for one in own:
            self._taken[one] += 1

    def formulas(self, own: Sequence[int]) -> tuple[Formula, ...]:
        return tuple([self._formula(one) for one in own])

    def tensors(self, own: Sequence[int]) -> list[list[Tensor]]:
        """The state of some parameters, each in the order of its formula."""
        return [[self._states[one][name] for name in self._formula(one).kept] for one in own]

    def counts(self, own: Sequence[int]) -> list[Tensor]:
        """The step counts that tensors hold."""
        found = [self._states[one].get("step") for one in own]
        return [one for one in found if isinstance(one, Tensor)]

    def rows(self, own: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Row of numbers of each parameter, and one parameter of each row.

        A group with equal step counts has one row; else each parameter has its own.
        """
        groups = [self._group_of[one] for one in own]
        steps = {(group, self._taken[one]) for group, one in zip(groups, own, strict=True)}
        if len(steps) > len(set(groups)):
            return tuple(range(len(own))), tuple(own)
        order = list(dict.fromkeys(groups))
        return tuple([order.index(group) for group in groups]), tuple([own[groups.index(one)] for one in order])

    def numbers(self, one: int) -> list[float]:
        """Numbers of the next step of a parameter."""
        return self._formula(one).numbers(self._optimizer.param_groups[self._group_of[one]], self._taken[one])
