"""Several optimizers over one model, such as Muon for the matrices and AdamW for the rest."""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, final

from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.tensors import parameters_in

Group = dict[str, Any]


@final
class Optimizers:
    """Groups, state and saved numbers of several optimizers, in their order. Only the `Stepper` steps them.

    Raises:
        ArgumentError: a parameter is in two optimizers, or an optimizer has its own `state_dict`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> both = Optimizers((torch.optim.Muon([model.weight], lr=0.02), torch.optim.AdamW([model.bias], lr=1e-3)))
    >>> [group["lr"] for group in both.param_groups]
    [0.02, 0.001]
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        _check(parts)
        self.parts = tuple(parts)
        self.defaults: Group = parts[-1].defaults

    def __repr__(self) -> str:
        return f"({', '.join(map(repr, self.parts))})"

    @property
    def param_groups(self) -> list[Group]:
        return [group for one in self.parts for group in one.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:
        """State by parameter, to read."""
        return ChainMap(*(one.state for one in self.parts))

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the last optimizer."""
        self.parts[-1].add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """State as of one optimizer. Keys of no parameter have the number of their optimizer before them."""
        state: dict[Any, Any] = {}
        groups: list[Group] = []
        for place, begin, one in self._numbered():
            saved = one.state_dict()
            state |= {_joint_key(key, place, begin): value for key, value in saved["state"].items()}
            groups += [
                {**group, "params": [begin + number for number in group["params"]]} for group in saved["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def _numbered(self) -> Iterator[tuple[int, int, Optimizer]]:
        """Place, first parameter number and optimizer of each part."""
        begin = 0
        for place, one in enumerate(self.parts):
            yield place, begin, one
            begin += len(parameters_in(one))


def joined(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """A tuple of optimizers as one; an optimizer itself."""
    if not isinstance(optimizer, list | tuple):
        return cast("Optimizer", optimizer)
    return cast("Optimizer", Optimizers([part for one in optimizer for part in parts_of(one)]))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers of a tuple, or the optimizer itself."""
    given = cast("Optimizer | Optimizers", optimizer)
    return given.parts if isinstance(given, Optimizers) else (given,)


def _joint_key(key: Any, place: int, begin: int) -> Any:
    return f"{place}.{key}" if isinstance(key, str) else begin + key


def _check(parts: Sequence[Optimizer]) -> None:
    owners: dict[int, Optimizer] = {}
    for one in parts:
        name = type(one).__name__
        if type(one).state_dict is not Optimizer.state_dict:
            raise ArgumentError(
                f"optimizers of a tuple save their `state`, but {name} has its own `state_dict`; leave it out.",
                field="optimizer",
            )
        for parameter in parameters_in(one):
            owner = owners.setdefault(id(parameter), one)
            if owner is not one:
                raise ArgumentError(
                    f"each parameter must have one optimizer, but one of shape {list(parameter.shape)} is in "
                    f"{type(owner).__name__} and in {name}; give each parameter to one of them.",
                    field="optimizer",
                )
