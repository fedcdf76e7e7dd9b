"""Finds frozen parameters that forwards move: a momentum encoder or a teacher that the model itself keeps up to date.

Nothing trains them and no gradient keeps them equal, so they are as buffers that forwards move; only nobody has said
so. Which they are shows when passes have written to them: by the tensor's version, by memory of another place
(`p.data = …`), and, looked for now and then, by other values (`p.data.mul_(…)`, of which the version does not tell).
Trained parameters that forwards write to are found in the same way: of several ranks each writes its own. It changes
nothing.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from evenstep.internals import times_written
from evenstep.names import named_parameters
from evenstep.parallel.buffers import Looks
from evenstep.parallel.replicas import first_numbers


@final
@dataclass(frozen=True, slots=True)
class FrozenParameter:
    """A parameter that nothing trains, where it stands in a model.

    Args:
        module: whose own parameter it is.
        name: in that module.
        full: its name in the model.
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
        self._looks = Looks()
        self._before: list[tuple[tuple[int, int], Tensor | None]] | None = None  # marks and values, when it looks

    def begin(self) -> None:
        """An update's passes begin: whatever was done to them before is none of theirs."""
        self._before = [self._seen(one.parameter) for one in self._still] if self._looks.advance() else None

    def _seen(self, parameter: nn.Parameter) -> tuple[tuple[int, int], Tensor | None]:
        compares = self._looks.updates <= 2 or parameter.device.type == "cpu"
        return mark_of(parameter), first_numbers(parameter) if compares else None

    def moved(self) -> list[FrozenParameter]:
        """Those that an update's passes have moved since `begin`, each once."""
        return self._taken(by_values=True)

    def received(self) -> list[FrozenParameter]:
        """Those that other ranks have moved, and that were written to here since; they are like `moved` ones."""
        return self._taken(by_values=False)

    def _taken(self, *, by_values: bool) -> list[FrozenParameter]:
        """Those to which was written; they are not looked at any more, under whatever name."""
        if self._before is None:
            return []
        found: list[FrozenParameter] = []
        for one, (mark, values) in zip(self._still, self._before, strict=True):
            tells = mark_of(one.parameter) != mark
            differs = by_values and values is not None and not torch.equal(values, first_numbers(one.parameter))
            if (tells or differs) and not one.parameter.requires_grad:
                found.append(FrozenParameter(one.module, one.name, one.full, one.parameter, tells))
        gone = {id(one.parameter) for one in found}
        kept = [both for both in zip(self._still, self._before, strict=True) if id(both[0].parameter) not in gone]
        self._still, self._before = [one for one, _ in kept], [before for _, before in kept]
        return found


class TrainedWrites:
    """Finds trained parameters that forwards write to, which is another matter than what the optimizer does to them.

    >>> model = nn.Linear(1, 1); writes = TrainedWrites(model); writes.begin()
    >>> _ = model.weight.data.mul_(2); writes.names()
    ['weight']
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: one for name, one in named_parameters(model).items() if _is_plain(one)}
        self._before: dict[str, tuple[tuple[int, int], Tensor]] = {}

    def begin(self) -> None:
        """An update's passes begin."""
        trained = {name: one for name, one in self.parameters.items() if one.requires_grad}
        self._before = {name: (mark_of(one), first_numbers(one)) for name, one in trained.items()}

    def names(self) -> list[str]:
        """The names of those that passes have written to since `begin`."""
        before, self._before = self._before, {}
        return [
            name
            for name, (mark, numbers) in before.items()
            if mark_of(self.parameters[name]) != mark or not torch.equal(numbers, first_numbers(self.parameters[name]))
        ]


def mark_of(parameter: Tensor) -> tuple[int, int]:
    """What is another when a parameter was written to, unless that was done to its `data` in place."""
    return times_written(parameter), parameter.data_ptr()


def _is_plain(parameter: nn.Parameter) -> bool:
    kinds = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
    return kinds and parameter.is_floating_point() and parameter.numel() > 0 and not parameter.is_meta
