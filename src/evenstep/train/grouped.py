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
from evenstep.pipeline import PipelineModel
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
    """The optimizer of a model: groups of parameters by patterns of their names.

    Parameters of frozen groups get `requires_grad` False, and no optimizer.

    Args:
        model: whose parameters; also in stages.
        optimizer: the class for all that no group has another for.
        lr: the learning rate of all that no group has another for.
        groups: by name; parameters that none of them takes are the `others`.
        weight_decay_on: "matrices" leaves biases, norms and vectors without weight decay; "all" gives it to all.
        options: further arguments of `optimizer`, such as `weight_decay`.
        options_of: further arguments of each class, such as `fused`.

    Raises:
        ArgumentError: an argument that cannot be, a pattern that takes no parameter, a parameter that two groups take.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    >>> head = ParameterGroup(patterns=("2.*",), lr_factor=10.0)
    >>> made = grouped_optimizer(model, lr=0.1, groups={"head": head}, weight_decay_on="matrices")
    >>> [(one["name"], one["lr"], one["weight_decay"], len(one["params"])) for one in made.param_groups]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('others', 0.1, 0.01, 1), ('others/no_decay', 0.1, 0.0, 3), ('head', 1.0, 0.01, 1), ('head/no_decay', 1.0, 0.0, 1)]
    """
    grouping = Grouping(groups=groups or {}, weight_decay_on=weight_decay_on)
    parameters = _described(model)
    by_name = named_parameters(unwrapped(model))
    assigned = grouping.assign(parameters)
    all_others = ParameterGroup(patterns=("*",))
    made: dict[type, list[dict[str, Any]]] = {}
    for part, names in assigned.items():
        group = grouping.groups.get(part.group, all_others)
        kind = group.optimizer or optimizer
        rate = (lr if group.lr is None else group.lr) * (group.lr_factor or 1.0)
        own = {"name": part.name, "lr": rate, **((options or {}) if kind is optimizer else {}), **group.options}
        if not part.decays or group.weight_decay is not None:
            own["weight_decay"] = group.weight_decay if part.decays else 0.0
        _check_taken(kind, own, part.group)
        parameters_here = [by_name[name] for name in names if name in by_name]
        made.setdefault(kind, []).append({"params": parameters_here, **own})
    if not made:
        raise ArgumentError(
            "there is nothing to train: all parameters are frozen; leave some out of the frozen groups.",
            field="groups",
        )
    rest = made.pop(optimizer, None)
    ordered = [*made.items(), *([(optimizer, _others_first(rest))] if rest else [])]
    optimizers = [cast("Any", kind)(several, lr=lr, **(options_of or {}).get(kind, {})) for kind, several in ordered]
    for name in grouping.frozen(parameters):  # last: an error above leaves the model unchanged
        if name in by_name:
            by_name[name].requires_grad_(False)
    return optimizers[0] if len(optimizers) == 1 else joined(optimizers)


def described_groups(optimizer: Optimizer) -> list[str]:
    """The groups of an optimizer in words, with how many parameters, and numbers in them, each has.

    >>> described_groups(torch.optim.SGD([{"params": [torch.zeros(2, 3)], "name": "head"}], lr=0.5))
    ['head: SGD, lr 0.5, weight decay 0, 1 parameter of 6 numbers']
    """
    lines: list[str] = []
    for one in parts_of(optimizer):
        for number, group in enumerate(one.param_groups):
            several = cast("list[nn.Parameter]", group["params"])
            decay = f", weight decay {float(group['weight_decay']):g}" if "weight_decay" in group else ""
            count = (
                f"{len(several)} parameter{'s' * (len(several) != 1)} of {sum(p.numel() for p in several):,} numbers"
            )
            lines.append(
                f"{group.get('name', number)}: {type(one).__name__}, lr {float(group['lr']):g}{decay}, {count}"
            )
    return lines


def _others_first(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(groups, key=lambda group: group["name"].partition("/")[0] != OTHERS)


def _described(model: nn.Module) -> list[ParameterInfo]:
    norms = {
        plain(f"{name}.{inner}".removeprefix("."))
        for name, module in unwrapped(model).named_modules()
        if "Norm" in type(module).__name__
        for inner, _ in module.named_parameters(recurse=False)
    }
    also = _other_names(model)
    mine = [
        ParameterInfo(name, one.ndim, name in norms, one.requires_grad, also.get(name, ()))
        for name, one in named_parameters(unwrapped(model)).items()
    ]
    if not isinstance(model, PipelineModel):
        return mine
    everybody = model.mesh.pipeline.gather([tuple(one) for one in mine])
    every = [ParameterInfo(*cast("Any", one)) for theirs in everybody for one in theirs]
    return [*{one.name: one for one in every}.values()]


def _other_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    of: dict[object, list[str]] = {}
    firsts = model.aliases if isinstance(model, PipelineModel) else {}
    for name, one in unwrapped(model).named_parameters(remove_duplicate=False):
        of.setdefault(id(one), []).append(plain(name))
    for name, first in firsts.items():
        of.setdefault(first, [first]).append(name)
    return {name: tuple(one for one in names if one != name) for names in of.values() for name in names if names[1:]}


def _check_taken(kind: type, own: Mapping[str, Any], group: str) -> None:
    taken = inspect.signature(kind).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for name in own:
        if name not in ("params", "name") and name not in taken:
            options = [each for each in taken if each not in ("params", "lr")]
            raise ArgumentError(
                f"`{name}` of group `{group}` is no argument of {kind.__name__}; it takes {', '.join(options)}.",
                field=name,
            )
