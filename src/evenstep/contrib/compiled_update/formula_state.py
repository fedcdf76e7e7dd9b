"""The state of an optimizer whose steps are made by formulas: its tensors, and how many steps each parameter has taken.

It stays in the optimizer under torch's names, and is looked up again before every update.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.contrib.compiled_update.formulas import Formula, formula_of

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
            self._state is not self._optimizer.state  # nor are its groups the same: all is replaced by what is loaded
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
