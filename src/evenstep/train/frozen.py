"""Finds frozen parameters that forwards move: a momentum encoder or a teacher that the model itself keeps up to date.

Nothing trains them and no gradient keeps them equal, so they are as buffers that forwards move; only nobody has said
so. Which they are shows when passes have written to them: by the tensor's version, by memory of another place
(`p.data = …`), and, looked for now and then, by other values (`p.data.mul_(…)`, of which the version does not tell). It
changes nothing.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from evenstep.internals import times_written

LOOKS = 64  # updates between two looks at values, after those at the 1st, 2nd, 4th, … of them


@final
@dataclass(frozen=True, slots=True)
class FrozenParameter:
    """A parameter that nothing trains, where it stands in a model.

    Args:
        module: whose own parameter it is.
        name: in that module.
        full: its name in the model.
        parameter: itself.
        tells: whether its version, or the place of its memory, tells that it was written to.
    """

    module: nn.Module
    name: str
    full: str
    parameter: nn.Parameter
    tells: bool = True


@final
class FrozenParameters:
    """The frozen parameters of a model that no pass has moved so far.

    >>> model = nn.Linear(1, 1).requires_grad_(False); frozen = FrozenParameters(model); frozen.begin()
    >>> _ = model.weight.data.mul_(2); [(one.full, one.tells) for one in frozen.moved()]
    [('weight', False)]
    """

    def __init__(self, model: nn.Module) -> None:
        self._still = [
            FrozenParameter(module, name, f"{prefix}.{name}" if prefix else name, parameter)
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if not parameter.requires_grad and _is_plain(parameter)
        ]
        self.exist = bool(self._still)
        self._marks: list[tuple[int, int]] = []
        self._values: list[Tensor] | None = None
        self._updates, self._next_look = 0, 1

    def begin(self) -> None:
        """An update's passes begin: whatever was done to them before is none of theirs."""
        self._marks = [mark_of(one.parameter) for one in self._still]
        looks = self._updates + 1 >= self._next_look
        self._values = [_first_numbers(one.parameter) for one in self._still] if looks else None

    def moved(self) -> list[FrozenParameter]:
        """Those that an update's passes have moved since `begin`, each once."""
        self._updates += 1
        if self._updates >= self._next_look:
            self._next_look = self._updates * 2 if self._updates < LOOKS else self._updates + LOOKS
        values = [] if self._values is None else self._values
        same = [(_first_numbers(one.parameter) == then).all() for one, then in zip(self._still, values, strict=False)]
        is_same = torch.stack(same).tolist() if same else [True] * len(self._still)
        return self._taken([number for number, one in enumerate(is_same) if not one])

    def received(self) -> list[FrozenParameter]:
        """Those that other ranks have moved, and that were written to here since; they are like `moved` ones."""
        return self._taken([])

    def _taken(self, others: list[int]) -> list[FrozenParameter]:
        """Those to which was written, and `others` of which nothing tells; they are not looked at any more."""
        told = [number for number, one in enumerate(self._still) if mark_of(one.parameter) != self._marks[number]]
        found = [
            FrozenParameter(one.module, one.name, one.full, one.parameter, tells=number in told)
            for number, one in enumerate(self._still)
            if number in {*told, *others} and not one.parameter.requires_grad
        ]
        if found:
            gone = {id(one.parameter) for one in found}
            kept = [number for number, one in enumerate(self._still) if id(one.parameter) not in gone]
            self._marks = [self._marks[number] for number in kept]
            self._values = None if self._values is None else [self._values[number] for number in kept]
            self._still = [self._still[number] for number in kept]
        return found


def mark_of(parameter: Tensor) -> tuple[int, int]:
    """What is another when a parameter was written to, unless that was done to its `data` in place."""
    return times_written(parameter), parameter.data_ptr()


def _is_plain(parameter: nn.Parameter) -> bool:
    kinds = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
    return kinds and parameter.is_floating_point() and parameter.numel() > 0 and not parameter.is_meta


def _first_numbers(parameter: Tensor) -> Tensor:
    """A few of its numbers: what follows other weights moves in all of them."""
    own = parameter.detach()
    return (own[(0,) * (own.ndim - 1)][:8] if own.ndim else own).clone()
