"""Parameter groups by patterns of names: own learning rate, weight decay or optimizer, or not trained."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.arguments import advice, first_of
from evenstep.errors import ArgumentError
from evenstep.internals import unwrapped
from evenstep.optim.optimizers import joined, parts_of
from evenstep.schema import Natural, NonNegative, Positive, option
from evenstep.tensors import named_parameters, plain

DecayOn = Literal["all", "matrices"]
OTHERS = "others"
"""The name of the group of all parameters that no pattern takes."""


@option
class ParameterGroup:
    """Own options of the parameters whose names fit a pattern.

    >>> ParameterGroup(patterns=("head.*",), lr_factor=10.0).lr_factor
    10.0
    """

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


class _Parameter(NamedTuple):
    names: tuple[str, ...]  # its own, and other ones of a tied parameter
    dims: int
    is_matrix: bool
    trained: bool


def grouped_optimizer(
    model: nn.Module,
    optimizer: type[Optimizer] = torch.optim.AdamW,
    *,
    lr: float,
    groups: Mapping[str, ParameterGroup] | None = None,
    weight_decay_on: DecayOn = "all",
    options: Mapping[str, Any] | None = None,
    options_of: Mapping[type, Mapping[str, Any]] | None = None,
) -> Optimizer:
    """The optimizer of a model, also in stages: groups of parameters by patterns of their names.

    Parameters of frozen groups get `requires_grad` False, and no optimizer.

    Args:
        optimizer: class, `lr` and `options` (such as `weight_decay`) of all that no group has others for.
        groups: by name; parameters that none of them takes are the `others`.
        weight_decay_on: "matrices" leaves biases, norms and vectors without weight decay; "all" gives it to all.
        options_of: further arguments of each class, such as `fused`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    >>> head = ParameterGroup(patterns=("2.*",), lr_factor=10.0)
    >>> [(one["name"], one["lr"]) for one in grouped_optimizer(model, lr=0.1, groups={"head": head}).param_groups]
    [('others', 0.1), ('head', 1.0)]
    """
    given = dict(groups or {})
    parameters = _described(model)
    owners = _owners(given, parameters)
    by_name = named_parameters(unwrapped(model))
    made: dict[type, list[dict[str, Any]]] = {}
    for name, group in ({OTHERS: ParameterGroup(patterns=("*",))} | given).items():
        trained = [one for one in parameters if owners[one.names[0]] == name and one.trained and not group.frozen]
        kind = group.optimizer or optimizer
        rate = (lr if group.lr is None else group.lr) * (group.lr_factor or 1.0)
        for decays in (True, False):
            names = [one.names[0] for one in trained if decays == (weight_decay_on == "all" or one.is_matrix)]
            if not names:
                continue
            own: dict[str, Any] = {"name": name if decays else f"{name}/no_decay", "lr": rate}
            own |= {**((options or {}) if kind is optimizer else {}), **group.options}
            if not decays or group.weight_decay is not None:
                own["weight_decay"] = group.weight_decay if decays else 0.0
            _check_options(kind, own, name)
            made.setdefault(kind, []).append({"params": [by_name[one] for one in names if one in by_name], **own})
    if not made:
        raise ArgumentError("there is nothing to train: all parameters are in frozen groups.", field="groups")
    optimizers = [
        cast("Any", kind)(made[kind], lr=lr, **(options_of or {}).get(kind, {}))
        for kind in sorted(made, key=lambda kind: kind is optimizer)
    ]
    for name, parameter in by_name.items():  # last: an error above leaves the model unchanged
        if owners[name] in given and given[owners[name]].frozen:
            parameter.requires_grad_(False)
    return optimizers[0] if len(optimizers) == 1 else joined(optimizers)


def described_groups(optimizer: Optimizer) -> list[str]:
    """The groups of an optimizer in words.

    >>> described_groups(torch.optim.SGD([{"params": [torch.zeros(2, 3)], "name": "head"}], lr=0.5))
    ['head: SGD, lr 0.5, weight decay 0, 6 numbers']
    """
    return [
        f"{group.get('name', number)}: {type(one).__name__}, lr {float(group['lr']):g}, weight decay "
        f"{float(group.get('weight_decay', 0)):g}, {sum(each.numel() for each in group['params']):,} numbers"
        for one in parts_of(optimizer)
        for number, group in enumerate(one.param_groups)
    ]


def _described(model: nn.Module) -> list[_Parameter]:
    """Parameters of the model, on all ranks of a pipeline."""
    whole = unwrapped(model)
    stages: Any = model if hasattr(model, "stage_modules") else None  # a `PipelineModel`
    aliases: dict[str, str] = {} if stages is None else stages.aliases
    norms = [module for module in whole.modules() if "Norm" in type(module).__name__]
    of_norms = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    places: dict[int, list[str]] = {}
    for name, one in whole.named_parameters(remove_duplicate=False):
        places.setdefault(id(one), []).append(plain(name))
    mine: list[_Parameter] = []
    for name, one in named_parameters(whole).items():
        first = aliases.get(name, name)
        names = [name, *places[id(one)], first, *(other for other in aliases if aliases[other] == first)]
        is_matrix = one.ndim >= 2 and id(one) not in of_norms and name.rpartition(".")[2] != "bias"
        mine.append(_Parameter(tuple(dict.fromkeys(names)), one.ndim, is_matrix, one.requires_grad))
    if stages is None:
        return mine
    everybody = stages.mesh.pipeline.gather([tuple(one) for one in mine])
    return [_Parameter(*one) for theirs in everybody for one in theirs]


def _owners(groups: Mapping[str, ParameterGroup], parameters: Sequence[_Parameter]) -> dict[str, str]:
    """Name of the group of each parameter."""
    owners: dict[str, str] = {}
    for name, group in groups.items():
        candidates = [one for one in parameters if group.dims in (None, one.dims)]
        for pattern in group.patterns:
            fitting = [one.names[0] for one in candidates if any(fnmatchcase(n, pattern) for n in one.names)]
            if not fitting:
                dims = "" if group.dims is None else f" of {group.dims} dimensions"
                names = [one.names[0] for one in parameters]
                near = advice(pattern.replace("*", ""), names, f"there are {first_of(names)}.")
                raise ArgumentError(
                    f"`patterns` of group `{name}` has {pattern!r}, which fits no parameter{dims}; {near}",
                    field="patterns",
                )
            for one in fitting:
                if owners.setdefault(one, name) != name:
                    raise ArgumentError(
                        f"`{one}` fits `patterns` of the groups `{owners[one]}` and `{name}`; narrow a pattern.",
                        field="patterns",
                    )
    return {one.names[0]: owners.get(one.names[0], OTHERS) for one in parameters}


def _check_options(kind: type, own: Mapping[str, Any], group: str) -> None:
    taken = inspect.signature(kind).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for name in own.keys() - {"params", "name"} - taken.keys():  # torch takes any key of a group
        raise ArgumentError(f"`{name}` of group `{group}` is no argument of {kind.__name__}.", field=name)
