"""Parameter groups by the names of parameters: who has which learning rate, decay, optimizer, or is not trained.

Names and shapes are enough to say which group each parameter is in, so ranks that hold parts of a model come to the
same groups. Each parameter is in one group; what no pattern takes is in the group of the others. It makes no optimizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast, final, get_args

from torch.optim import Optimizer

from evenstep.arguments import (
    require_names,
    require_number,
    require_table,
    require_whole,
    require_word,
    said,
)
from evenstep.errors import ArgumentError

DecayOn = Literal["all", "matrices"]
OTHERS = "others"
"""The name of the group of all parameters that no pattern takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """What some of a model's parameters have of their own.

    Args:
        patterns: of their names, as in a shell: `*` is any text, "blocks.*", "*.bias". A tied parameter is meant by
            each of its names.
        dims: only those with so many dimensions, 2 for matrices; None for any.
        lr: their learning rate; None for that of all, times
        lr_factor: a factor.
        weight_decay: theirs; None for that of all, or with an `optimizer` of their own for that class's default.
        frozen: whether they are not trained.
        optimizer: the class that steps them; None for that of all.
        options: further arguments of their optimizer, such as `betas`.

    Raises:
        ArgumentError: an argument that cannot be, or that has no effect beside the others.

    >>> ParameterGroup(patterns=("head.*",), lr_factor=10.0).lr_factor
    10.0
    """

    patterns: tuple[str, ...]
    dims: int | None = None
    lr: float | None = None
    lr_factor: float | None = None
    weight_decay: float | None = None
    frozen: bool = False
    optimizer: type[Optimizer] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", require_names("patterns", self.patterns, "`patterns=('head.*',)`"))
        if not self.patterns:
            raise ArgumentError(
                "`patterns` must hold at least one pattern, but is empty; write `patterns=('head.*',)`."
            )
        if self.dims is not None:
            require_whole("dims", self.dims, at_least=0, advice="2 takes matrices")
        for name, least in (("lr", "above"), ("lr_factor", "above"), ("weight_decay", "at least")):
            if (value := getattr(self, name)) is not None:
                require_number(name, value, "(0, inf)" if least == "above" else "[0, inf)", f"{least} 0 and finite")
        require_table("options", self.options, "`options={'betas': (0.9, 0.95)}`")
        if self.optimizer is not None:
            check_class(self.optimizer)
        check_options(self.options)
        if self.weight_decay is not None and "weight_decay" in self.options:
            raise ArgumentError("`weight_decay` of a group is given twice, once in its `options`; leave one out.")
        if self.lr is not None and self.lr_factor is not None:
            raise ArgumentError("`lr` and `lr_factor` of a group both say its learning rate; leave one out.")
        own = [name for name in ("lr", "lr_factor", "weight_decay", "optimizer") if getattr(self, name) is not None]
        if self.frozen and (own or self.options):
            raise ArgumentError(
                f"`{(own or ['options'])[0]}` has no effect on a group that is `frozen`; leave one of them out."
            )

    def takes(self, one: "Described") -> bool:
        """Whether a parameter is of this group."""
        fits = self.dims is None or one.dims == self.dims
        return fits and any(one.fits(pattern) for pattern in self.patterns)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for what an optimizer's further arguments can't say, since it is said otherwise."""
    if "lr" in options:
        raise ArgumentError(
            "`options` has `lr`, beside which `lr`, `lr_factor` and `layer_decay` would have no effect; give `lr=…` "
            "instead."
        )
    if own := [name for name in ("params", "name") if name in options]:
        raise ArgumentError(f"`options` has `{own[0]}`, which each group has of its own; leave it out.")


def check_class(optimizer: object) -> None:
    """Raise ArgumentError unless `optimizer` is a class of optimizers."""
    if not isinstance(optimizer, type) or not issubclass(optimizer, Optimizer):
        raise ArgumentError(
            f"`optimizer` must be a class of optimizers, such as `torch.optim.AdamW`, but is {said(optimizer)}."
        )


class Described(NamedTuple):
    """A parameter as far as groups look at it.

    Args:
        name: in the model.
        dims: how many dimensions it has.
        is_norm: whether it belongs to a normalisation layer.
        trained: whether it has `requires_grad`.
        also: its other names, where it is tied: patterns may mean any of them.
    """

    name: str
    dims: int
    is_norm: bool
    trained: bool
    also: tuple[str, ...] = ()

    def fits(self, pattern: str) -> bool:
        """Whether a pattern fits one of its names."""
        return any(fnmatchcase(name, pattern) for name in (self.name, *self.also))

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a layer that multiplies: no bias, no norm, no single vector."""
        return self.dims >= 2 and not self.is_norm and self.name.rpartition(".")[2] != "bias"


class GroupPart(NamedTuple):
    """The parameters of one group that also share their learning rate and decay.

    Args:
        group: the name of the group.
        depth: the number of their layer, from 0; None without layer-wise decay.
        decays: whether weight decay is for them.
    """

    group: str
    depth: int | None
    decays: bool

    @property
    def name(self) -> str:
        """How messages and metrics call it."""
        layer = [] if self.depth is None else [f"layer_{self.depth}"]
        return "/".join([self.group, *layer, *([] if self.decays else ["no_decay"])])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How the parameters of a model are dealt to groups.

    Args:
        groups: by name, in the order in which they are stepped.
        weight_decay_on: "matrices" leaves biases, norms and vectors without weight decay; "all" gives it to all.
        layer_decay: d, what the learning rate of each layer is multiplied by, compared with the layer behind it.
        layers: the name of the list of layers that this counts, such as "blocks".

    Raises:
        ArgumentError: an argument that cannot be.
    """

    groups: Mapping[str, ParameterGroup] = field(default_factory=lambda: MappingProxyType({}))
    weight_decay_on: DecayOn = "all"
    layer_decay: float | None = None
    layers: str | None = None

    def __post_init__(self) -> None:
        require_table("groups", self.groups, "`groups={'head': ParameterGroup(patterns=('head.*',))}`")
        for name, group in self.groups.items():
            if not isinstance(cast("object", group), ParameterGroup):
                raise ArgumentError(f"`groups[{name!r}]` must be a ParameterGroup, but is {group!r}.")
            if name == OTHERS or "/" in name or not name:
                raise ArgumentError(
                    f"a group can't be called {name!r}, as `{OTHERS}` are those of no group and `/` divides groups; "
                    f"call it otherwise."
                )
        require_word("weight_decay_on", self.weight_decay_on, get_args(DecayOn))
        if self.layers is not None and not isinstance(cast("object", self.layers), str):
            raise ArgumentError(f"`layers` must be the name of a list of layers, but is {self.layers!r}.")
        if (self.layer_decay is None) != (self.layers is None):
            missing = "layers" if self.layers is None else "layer_decay"
            raise ArgumentError(
                f"`layer_decay` and `layers` go together, but `{missing}` is missing; give both: "
                f"`layer_decay=0.8, layers='blocks'`."
            )
        if self.layer_decay is not None:
            require_number("layer_decay", self.layer_decay, "(0, 1]", "above 0 and at most 1", "")

    def deal(self, parameters: Sequence[Described]) -> dict[GroupPart, list[str]]:
        """The names of the parameters of each part, in the order of the groups, the others last.

        Args:
            parameters: all of the model, in its order. Frozen ones are in no part.

        Raises:
            ArgumentError: a parameter that two groups take, a pattern that takes none, or no such layers.
        """
        owners = self._owners(parameters)
        depths = self._depths([one.name for one in parameters])
        dealt: dict[GroupPart, list[str]] = {}
        for name in (*self.groups, OTHERS):
            found: dict[GroupPart, list[str]] = {}
            for one in parameters:
                if owners[one.name] == name and one.trained and not (name in self.groups and self.groups[name].frozen):
                    decays = self.weight_decay_on == "all" or one.is_matrix
                    found.setdefault(GroupPart(name, depths.get(one.name), decays), []).append(one.name)
            ordered = sorted(found, key=lambda part: (part.depth or 0, not part.decays))
            dealt |= {part: found[part] for part in ordered}
        return dealt

    def frozen(self, parameters: Sequence[Described]) -> list[str]:
        """The names of the parameters of groups that are not trained."""
        owners = self._owners(parameters)
        return [one.name for one in parameters if (group := self.groups.get(owners[one.name])) and group.frozen]

    def factor(self, part: GroupPart, num_layers: int) -> float:
        """What the learning rate of a part is multiplied by for its layer: d^(L + 1 - depth)."""
        return 1.0 if part.depth is None or self.layer_decay is None else self.layer_decay ** (num_layers - part.depth)

    def num_layers(self, parameters: Sequence[Described]) -> int:
        """L + 1: the depth of what comes behind the last layer, even if nothing does."""
        return max(self._inside([one.name for one in parameters]).values(), default=0) + 1

    def _owners(self, parameters: Sequence[Described]) -> dict[str, str]:
        owners: dict[str, str] = {}
        for one in parameters:
            takers = [name for name, group in self.groups.items() if group.takes(one)]
            if len(takers) > 1:
                also = f" (tied: it is also `{'`, `'.join(one.also)}`)" if one.also else ""
                raise ArgumentError(
                    f"each parameter must be in one group, but `{one.name}`{also} fits the `patterns` of group "
                    f"`{takers[0]}` and those of `{takers[1]}`; narrow one of them."
                )
            owners[one.name] = takers[0] if takers else OTHERS
        for name, group in self.groups.items():
            for pattern in group.patterns:
                if not any(one.fits(pattern) and group.takes(one) for one in parameters):
                    raise ArgumentError(_unused(name, group, pattern, parameters))
        return owners

    def _depths(self, names: Sequence[str]) -> dict[str, int]:
        """The depth of each parameter: 0 before the layers, 1 … L in them, L + 1 behind."""
        inside = self._inside(names)
        if not inside:
            return {}
        last_place = max(place for place, name in enumerate(names) if name in inside)
        behind = max(inside.values()) + 1
        return {name: inside.get(name, 0 if place < last_place else behind) for place, name in enumerate(names)}

    def _inside(self, names: Sequence[str]) -> dict[str, int]:
        """The depth, 1 … L, of each parameter in the layers; none without layer-wise decay."""
        if self.layers is None:
            return {}
        prefix = f"{self.layers}."
        numbers = {name: name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
        inside = {name: int(number) + 1 for name, number in numbers.items() if number.isdecimal()}
        if not inside:
            lists = sorted({name.partition(".0.")[0] for name in names if ".0." in name})
            raise ArgumentError(
                f"`layers` must name a list of layers with parameters, but there is no `{self.layers}.0.…`; "
                f"there are {', '.join(lists) or 'no lists'}."
            )
        return inside


def _unused(name: str, group: ParameterGroup, pattern: str, parameters: Sequence[Described]) -> str:
    """What to say of a pattern that takes no parameter."""
    fit = [one for one in parameters if one.fits(pattern)]
    if fit:
        dims = ", ".join(sorted({str(one.dims) for one in fit}))
        return (
            f"`patterns` of group `{name}` has {pattern!r}, which fits {len(fit)} parameters of {dims} dimensions, but "
            f"none of the {group.dims} that `dims` asks for; change one of them."
        )
    names = [one.name for one in parameters]
    close = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.4) or names[:3]
    return (
        f"`patterns` of group `{name}` has {pattern!r}, which fits no parameter; near it are "
        f"{', '.join(f'`{one}`' for one in close)}."
    )
