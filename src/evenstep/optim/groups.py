"""Parameter groups by patterns of names: own learning rate, weight decay or optimizer, or not trained."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Interval
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
    """Parameters of one group with one learning rate and decay; `depth` is None without layer-wise decay."""

    group: str
    depth: int | None
    decays: bool

    @property
    def name(self) -> str:
        layer = [] if self.depth is None else [f"layer_{self.depth}"]
        return "/".join([self.group, *layer, *([] if self.decays else ["no_decay"])])


@option
class Grouping:
    """Assignment of parameters to groups; see `grouped_optimizer`."""

    _: KW_ONLY
    groups: Mapping[str, ParameterGroup] = field(default_factory=dict[str, ParameterGroup])
    weight_decay_on: DecayOn = "all"
    """`matrices` applies weight decay to parameters with two or more dimensions only, not to biases, norms and other
    vectors; `all` applies it to everything."""
    layer_decay: Annotated[float, Interval(gt=0, le=1)] | None = None
    """Learning rate of each layer as a multiple of that of the next layer: below 1, layers learn the more slowly the
    nearer they are to the input. By default all have the same."""
    layers: str | None = None
    """Name of the module list that `layer_decay` counts, such as "encoder.blocks"."""

    def __post_init__(self) -> None:
        if (self.layer_decay is None) != (self.layers is None):
            raise ArgumentError(
                "`layer_decay` and `layers` go together, but only one is given; write `layer_decay=0.8, "
                "layers='blocks'`.",
                field="layer_decay",
            )

    def assign(self, parameters: Sequence[ParameterInfo]) -> dict[SubGroup, list[str]]:
        """The names of the trained parameters of each part, in the order of the groups, the others last."""
        owners = self._owners(parameters)
        depths = self._depths([one.name for one in parameters])
        assigned: dict[SubGroup, list[str]] = {}
        for name in (*self.groups, OTHERS):
            found: dict[SubGroup, list[str]] = {}
            for one in parameters:
                if owners[one.name] == name and one.trained and not (name in self.groups and self.groups[name].frozen):
                    decays = self.weight_decay_on == "all" or one.is_matrix
                    found.setdefault(SubGroup(name, depths.get(one.name), decays), []).append(one.name)
            ordered = sorted(found, key=lambda part: (part.depth or 0, not part.decays))
            assigned |= {part: found[part] for part in ordered}
        return assigned

    def frozen(self, parameters: Sequence[ParameterInfo]) -> list[str]:
        """The names of the parameters of frozen groups."""
        owners = self._owners(parameters)
        return [one.name for one in parameters if (group := self.groups.get(owners[one.name])) and group.frozen]

    def factor(self, part: SubGroup, num_layers: int) -> float:
        return 1.0 if part.depth is None or self.layer_decay is None else self.layer_decay ** (num_layers - part.depth)

    def num_layers(self, parameters: Sequence[ParameterInfo]) -> int:
        """L + 1: the depth of what comes behind the last layer, even if nothing does."""
        return max(self._inside([one.name for one in parameters]).values(), default=0) + 1

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

    def _depths(self, names: Sequence[str]) -> dict[str, int]:
        inside = self._inside(names)
        if not inside:
            return {}
        last_place = max(place for place, name in enumerate(names) if name in inside)
        behind = max(inside.values()) + 1
        return {name: inside.get(name, 0 if place < last_place else behind) for place, name in enumerate(names)}

    def _inside(self, names: Sequence[str]) -> dict[str, int]:
        if self.layers is None:
            return {}
        prefix = f"{self.layers}."
        numbers = {name: name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
        inside = {name: int(number) + 1 for name, number in numbers.items() if number.isdecimal()}
        if not inside:
            lists = sorted({name.partition(".0.")[0] for name in names if ".0." in name})
            raise ArgumentError(
                f"`layers` must name a list of layers, but there is no `{self.layers}.0.…`; there are {lists}.",
                field="layers",
            )
        return inside


def _unused(name: str, group: ParameterGroup, pattern: str, parameters: Sequence[ParameterInfo]) -> ArgumentError:
    names = [one.name for one in parameters]
    close = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.4) or names[:3]
    dims = "" if group.dims is None else f" of {group.dims} dimensions"
    return ArgumentError(
        f"`patterns` of group `{name}` has {pattern!r}, which fits no parameter{dims}; near it are "
        f"{', '.join(f'`{one}`' for one in close)}.",
        field="patterns",
    )
