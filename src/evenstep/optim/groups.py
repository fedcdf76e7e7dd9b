"""Parameter groups by patterns of names: own learning rate, weight decay or optimizer, or not trained."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.schema import Natural, NonNegative, Positive, option

DecayOn = Literal["all", "matrices"]
OTHERS = "others"
"""The name of the group of all parameters that no pattern takes."""


@option
class ParameterGroup:
    """Own options of the parameters whose names fit a pattern.

    >>> ParameterGroup(patterns=("head.*",), lr_factor=10.0).lr_factor
    10.0
    """

    _: KW_ONLY
    patterns: Sequence[str]
    """Names of parameters; `*` stands for any text: "blocks.*", "*.bias". A tied parameter has several names."""
    dims: Natural | None = None
    """Only parameters with this many dimensions, 2 for matrices. Any number by default."""
    lr: Positive | None = None
    """Learning rate; by default the optimizer's."""
    lr_factor: Positive | None = None
    """Learning rate as a multiple of the optimizer's. Give either this or `lr`."""
    weight_decay: NonNegative | None = None
    """Weight decay. By default the optimizer's, or with another class the default of that class."""
    frozen: bool = False
    """Do not train these parameters."""
    optimizer: type[Optimizer] | None = None
    """Class of the optimizer that steps them."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the optimizer, such as `betas`."""

    def takes(self, one: "ParameterInfo") -> bool:
        fits = self.dims is None or one.dims == self.dims
        return fits and any(one.fits(pattern) for pattern in self.patterns)


class ParameterInfo(NamedTuple):
    """A parameter as groups see it; `also` holds the other names of a tied one."""

    name: str
    dims: int
    is_norm: bool
    trained: bool
    also: tuple[str, ...] = ()

    def fits(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in (self.name, *self.also))

    @property
    def is_matrix(self) -> bool:
        return self.dims >= 2 and not self.is_norm and self.name.rpartition(".")[2] != "bias"


class SubGroup(NamedTuple):
    """Parameters of one group, with or without weight decay."""

    group: str
    decays: bool

    @property
    def name(self) -> str:
        return self.group if self.decays else f"{self.group}/no_decay"


@option
class Grouping:
    """Assignment of parameters to groups; see `grouped_optimizer`."""

    _: KW_ONLY
    groups: Mapping[str, ParameterGroup] = field(default_factory=dict[str, ParameterGroup])
    weight_decay_on: DecayOn = "all"
    """`matrices` applies weight decay to parameters with two or more dimensions only, not to biases, norms and other
    vectors; `all` applies it to everything."""

    def assign(self, parameters: Sequence[ParameterInfo]) -> dict[SubGroup, list[str]]:
        """The names of the trained parameters of each part, in the order of the groups, the others last."""
        owners = self._owners(parameters)
        frozen = self._frozen_groups()
        assigned: dict[SubGroup, list[str]] = {}
        for name in (*self.groups, OTHERS):
            own = [one for one in parameters if owners[one.name] == name and one.trained and name not in frozen]
            for decays in (True, False):
                names = [one.name for one in own if decays == (self.weight_decay_on == "all" or one.is_matrix)]
                if names:
                    assigned[SubGroup(name, decays)] = names
        return assigned

    def frozen(self, parameters: Sequence[ParameterInfo]) -> list[str]:
        """The names of the parameters of frozen groups."""
        owners = self._owners(parameters)
        frozen = self._frozen_groups()
        return [one.name for one in parameters if owners[one.name] in frozen]

    def _frozen_groups(self) -> set[str]:
        return {name for name, group in self.groups.items() if group.frozen}

    def _owners(self, parameters: Sequence[ParameterInfo]) -> dict[str, str]:
        owners: dict[str, str] = {}
        for one in parameters:
            takers = [name for name, group in self.groups.items() if group.takes(one)]
            if len(takers) > 1:
                raise ArgumentError(
                    f"each parameter must be in one group, but `{one.name}` fits the `patterns` of group "
                    f"`{takers[0]}` and those of `{takers[1]}`; narrow one of them.",
                    field="patterns",
                )
            owners[one.name] = takers[0] if takers else OTHERS
        for name, group in self.groups.items():
            for pattern in group.patterns:
                if not any(one.fits(pattern) and group.takes(one) for one in parameters):
                    raise _unused(name, group, pattern, parameters)
        return owners


def _unused(name: str, group: ParameterGroup, pattern: str, parameters: Sequence[ParameterInfo]) -> ArgumentError:
    names = [one.name for one in parameters]
    close = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.4) or names[:3]
    dims = "" if group.dims is None else f" of {group.dims} dimensions"
    return ArgumentError(
        f"`patterns` of group `{name}` has {pattern!r}, which fits no parameter{dims}; near it are "
        f"{', '.join(f'`{one}`' for one in close)}.",
        field="patterns",
    )
