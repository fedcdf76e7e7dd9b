"""Makes the optimizer of a model whose parameters are in groups, the same groups on all ranks of stages."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import unwrapped
from evenstep.optim.groups import OTHERS, DecayOn, Grouping, ParameterGroup, ParameterInfo
from evenstep.optim.optimizers import joined, parts_of
from evenstep.tensors import named_parameters, plain


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
    grouping = Grouping(groups=groups or {}, weight_decay_on=weight_decay_on)
    parameters = _described(model)
    by_name = named_parameters(unwrapped(model))
    all_others = ParameterGroup(patterns=("*",))
    made: dict[type, list[dict[str, Any]]] = {}
    for part, names in grouping.assign(parameters).items():
        group = grouping.groups.get(part.group, all_others)
        kind = group.optimizer or optimizer
        rate = (lr if group.lr is None else group.lr) * (group.lr_factor or 1.0)
        own = {"name": part.name, "lr": rate, **((options or {}) if kind is optimizer else {}), **group.options}
        if not part.decays or group.weight_decay is not None:
            own["weight_decay"] = group.weight_decay if part.decays else 0.0
        _check_options(kind, own, part.group)
        made.setdefault(kind, []).append({"params": [by_name[name] for name in names if name in by_name], **own})
    if not made:
        raise ArgumentError("there is nothing to train: all parameters are in frozen groups.", field="groups")
    rest = made.pop(optimizer, None)
    if rest:  # last, the others first
        made[optimizer] = sorted(rest, key=lambda group: group["name"].partition("/")[0] != OTHERS)
    optimizers = [
        cast("Any", kind)(several, lr=lr, **(options_of or {}).get(kind, {})) for kind, several in made.items()
    ]
    for name in grouping.frozen(parameters):  # last: an error above leaves the model unchanged
        if name in by_name:
            by_name[name].requires_grad_(False)
    return optimizers[0] if len(optimizers) == 1 else joined(optimizers)


def described_groups(optimizer: Optimizer) -> list[str]:
    """The groups of an optimizer in words, with the numbers of their parameters.

    >>> described_groups(torch.optim.SGD([{"params": [torch.zeros(2, 3)], "name": "head"}], lr=0.5))
    ['head: SGD, lr 0.5, weight decay 0, 1 parameter of 6 numbers']
    """
    lines: list[str] = []
    for one in parts_of(optimizer):
        for number, group in enumerate(one.param_groups):
            sizes = [parameter.numel() for parameter in group["params"]]
            decay = f", weight decay {float(group['weight_decay']):g}" if "weight_decay" in group else ""
            rate = f"{group.get('name', number)}: {type(one).__name__}, lr {float(group['lr']):g}{decay}"
            count = "1 parameter" if len(sizes) == 1 else f"{len(sizes)} parameters"
            lines.append(f"{rate}, {count} of {sum(sizes):,} numbers")
    return lines


def _described(model: nn.Module) -> list[ParameterInfo]:
    whole = unwrapped(model)
    norms = {
        id(parameter)
        for module in whole.modules()
        if "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }
    stages: Any = model if hasattr(type(model), "parameter_sizes") else None  # a `PipelineModel`
    also = _other_names(whole, {} if stages is None else stages.aliases)
    mine = [
        ParameterInfo(name, one.ndim, id(one) in norms, one.requires_grad, also.get(name, ()))
        for name, one in named_parameters(whole).items()
    ]
    if stages is None:
        return mine
    every = [
        ParameterInfo(*one) for theirs in stages.mesh.pipeline.gather([tuple(one) for one in mine]) for one in theirs
    ]
    return [*{one.name: one for one in every}.values()]


def _other_names(model: nn.Module, firsts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    of: dict[object, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        of.setdefault(id(one), []).append(plain(name))
    for name, first in firsts.items():
        of.setdefault(first, [first]).append(name)
    return {name: tuple(one for one in names if one != name) for names in of.values() for name in names if names[1:]}


def _check_options(kind: type, own: Mapping[str, Any], group: str) -> None:
    taken = inspect.signature(kind).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for name in own.keys() - {"params", "name"} - taken.keys():  # torch takes any key of a group
        raise ArgumentError(f"`{name}` of group `{group}` is no argument of {kind.__name__}.", field=name)
