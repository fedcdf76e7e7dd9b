"""The steps of torch's AdamW, Adam and SGD as formulas of tensors, to be compiled with what gives the gradient.

Rates and bias corrections are numbers that the host computes in float64, as torch's kernels do.
Each has `kept` (names of its tensors in the optimizer's state), `counts` (the state has a `step`) and `width` numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import is_, methodcaller
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
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

_values = methodcaller("values")


@final
class FormulaState:
    """The parameters that an optimizer holds, by their number in its groups, with their state.

    Args:
        optimizer: of a class among `FORMULAS`.

    Attributes:
        parameters: in the order of the groups.
        version: another number whenever what `rows` gives may have changed.

    >>> sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.5, momentum=0.9)
    >>> state = FormulaState(sgd); state.begin((0,))
    True
    >>> state.tensors((0,)), state.rows((0,)), state.numbers((0,))
    ([[tensor([0., 0.])]], ((0,), (0,)), [0, 0.0, 1.0, 0.9, 0.5])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self.parameters: list[nn.Parameter] = [one for group in self._groups for one in group["params"]]
        self._group_of = [number for number, group in enumerate(self._groups) for _ in group["params"]]
        self.version = 0
        self._last: tuple[int, ...] | None = None
        self._new: list[int] = []  # those whose state was made for the step that is being computed
        self.read()

    def read(self) -> None:
        """Read state and step counts of the optimizer."""
        self._groups = self._optimizer.param_groups
        self._formulas = [formula_of(self._optimizer, group) for group in self._groups]
        self._state: Any = self._optimizer.state
        self._states: list[dict[str, Any]] = [self._state.get(one, {}) for one in self.parameters]
        pairs = zip(self._states, self._group_of, strict=True)
        self._taken = [self._formulas[group].steps_taken(state) for state, group in pairs]
        self._count()
        self._lengths, standing = _held_in(self._state)
        self._standing = list(standing)
        self._complete: set[tuple[int, ...]] = set()
        self.version += 1

    def _count(self) -> None:
        self._counts: list[tuple[Tensor, list[int]]] = []
        counted: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for one, state in enumerate(self._states):
            if isinstance(step := state.get("step"), Tensor):
                counted.setdefault((step.device, step.dtype), []).append(one)
        for numbers in counted.values():
            counts = torch.stack([self._states[one]["step"] for one in numbers])
            self._counts.append((counts, numbers))
            for one, count in zip(numbers, counts.unbind(), strict=True):
                self._states[one]["step"] = count

    def follow(self) -> None:
        """Read the optimizer again if its state was replaced or its options were changed."""
        lengths, standing = _held_in(self._optimizer.state)
        if (
            self._state is not self._optimizer.state  # nor are its groups the same: a load replaces all of them
            or lengths != self._lengths
            or not all(map(is_, standing, self._standing))  # tensors: their values are not compared
            or [formula_of(self._optimizer, group) for group in self._optimizer.param_groups] != self._formulas
        ):
            self.read()

    def formulas(self, own: Sequence[int]) -> tuple[Formula, ...]:
        return tuple([self._formulas[self._group_of[one]] for one in own])

    def begin(self, own: tuple[int, ...]) -> bool:
        """Make missing state, as before a first step; True if there was any."""
        if own in self._complete:
            return False
        new: list[int] = []
        for one in own:
            formula, state, parameter = self._formulas[self._group_of[one]], self._states[one], self.parameters[one]
            lacking = [name for name in formula.kept if state.get(name) is None]
            if not lacking and not (formula.counts and "step" not in state):
                continue
            new.append(one)
            made = self._state[parameter]
            if formula.counts and "step" not in made:
                group = self._groups[self._group_of[one]]
                there = parameter.device if group.get("fused") or group.get("capturable") else None
                made["step"] = torch.zeros((), dtype=torch.float32, device=there)
            for name in lacking:
                made[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if new:
            self.read()
            for one in new:
                self._taken[one] = 0
            self._new = new
        self._complete.add(own)
        return bool(new)

    def forget(self) -> None:
        """Undo `begin`, as the step was not taken."""
        new, self._new = self._new, []
        for one in new:
            del self._state[self.parameters[one]]
        if new:
            self.read()

    def tensors(self, own: Sequence[int]) -> list[list[Tensor]]:
        """The state of some parameters, each in the order of its formula."""
        states = self._states
        return [[states[one][name] for name in self._formulas[self._group_of[one]].kept] for one in own]

    def counts(self, own: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Stacked step counts, and the increments of a step of some parameters."""
        held, counts, added = frozenset(own), list[Tensor](), list[Tensor]()
        for count, numbers in self._counts:
            counts.append(count)
            added.append(torch.tensor([float(one in held) for one in numbers], dtype=count.dtype).to(count.device))
        return counts, added

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

    def numbers(self, rows: Sequence[int]) -> list[float]:
        """Numbers of the next step, row after row, from a parameter of each row."""
        found: list[float] = []
        for one in rows:
            group = self._group_of[one]
            found += self._formulas[group].numbers(self._groups[group], self._taken[one])
        return found

    def committed(self, own: tuple[int, ...]) -> None:
        """Count a step of some parameters."""
        self._new = []
        if own != self._last:  # some have taken more steps than others now
            self._last = own
            self.version += 1
        taken = self._taken
        for one in own:
            taken[one] += 1


def _held_in(state: Mapping[Any, Mapping[str, Any]]) -> tuple[list[int], Iterable[object]]:
    of_each = list(state.values())
    return list(map(len, of_each)), chain(of_each, *map(_values, of_each))
