"""State of an optimizer as a tree by parameter name, and its assignment to the bit."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.errors import ArgumentError, CheckpointError
from evenstep.internals import unwrapped
from evenstep.optim.low_bit import as_plain, from_plain, is_low_bit
from evenstep.optim.optimizers import has_own_state_dict, parts_of
from evenstep.parallel import mapped
from evenstep.tensors import laid_out, named_parameters, parameters_in
from evenstep.train.state import Tree
from evenstep.train.state.settings import how_to_reset

_KERNEL_OPTIONS = {"foreach", "fused", "capturable", "differentiable", "param_names"}


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Parameter names of each group."""
    names = {id(parameter): name for name, parameter in named_parameters(unwrapped(model)).items()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ArgumentError(
                    f"group {number} of the optimizer has a parameter of shape {list(parameter.shape)} that is not the "
                    f"model's; build the optimizer from this model's `parameters()`, after all that replaces them.",
                    field="optimizer",
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def options_of(optimizer: Optimizer) -> list[Tree]:
    """Options of each group, copied."""
    return [mapped(_options(group), lambda value: value.detach().clone()) for group in optimizer.param_groups]


def optimizer_state(optimizer: Optimizer, names: list[list[str]], built: list[Tree]) -> Tree:
    """State of the optimizer by the `names` of each group's parameters; `built` are options of `options_of`.

    `whole` is the `state_dict` of an optimizer that has its own.
    """
    groups = [
        {"parameters": list(own), "options": _options(group), "built": then}
        for group, own, then in zip(optimizer.param_groups, names, built, strict=True)
    ]
    tree: Tree = {"class": _class_name(optimizer), "state": {}, "groups": groups}
    parts = parts_of(optimizer)
    if any(map(has_own_state_dict, parts)):
        return {**tree, "whole": optimizer.state_dict()}
    name_of = _names_by_parameter(optimizer, names)
    for part in parts:
        for parameter in parameters_in(part):
            if parameter in part.state:
                values = part.state[parameter]
                tree["state"][name_of[parameter]] = {key: as_plain(value) for key, value in values.items()}
    beside = [{key: value for key, value in part.state.items() if key not in name_of} for part in parts]
    return {**tree, "beside": beside} if any(beside) else tree


def check_optimizer(saved: Tree, optimizer: Optimizer, names: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError unless the saved state is of the same class and groups."""
    groups = [sorted(group["parameters"]) for group in saved["groups"]]
    own = _class_name(optimizer)
    if saved["class"] == own and groups == [sorted(group) for group in names]:
        return
    raise CheckpointError(
        f"the checkpoint's optimizer is {saved['class']} with groups of {[len(group) for group in groups]} parameters, "
        f"but this run's is {own} with groups of {[len(group) for group in names]}, or of other parameters. Build it "
        f"as in the run that saved it, or reset it: {how_to_reset('optimizer')}."
    )


def changed_options(saved: Tree, built: list[Tree]) -> list[str]:
    """Options, such as a weight decay, that this optimizer was built with other values of; one text each."""
    said: list[str] = []
    for number, (group, now) in enumerate(zip(saved["groups"], built, strict=True)):
        where = f" of group {number}" if len(built) > 1 else ""
        said += [
            f"the optimizer's `{name}`{where} was {_text(group['built'][name])} and is now {_text(now[name])}"
            for name in sorted(_changed(now, group["built"]) - _KERNEL_OPTIONS)
        ]
    if said and "whole" in saved:
        raise CheckpointError(
            f"{'; '.join(said)}, but its own `state_dict` restores the old. Keep the old value, or reset the "
            f"optimizer: {how_to_reset('optimizer')}."
        )
    return said


def load_optimizer(saved: Tree, optimizer: Optimizer, names: list[list[str]], built: list[Tree]) -> None:
    """Assign a state of `optimizer_state`, by name and in the saved formats.

    An option that was built with another value than in the saved run keeps its new value.
    """
    if "whole" in saved:
        optimizer.load_state_dict(deepcopy(saved["whole"]))
        return
    merged = [
        {**group["options"], **{key: then[key] for key in _changed(then, group["built"])}}
        for group, then in zip(saved["groups"], built, strict=True)
    ]
    options = deepcopy(merged)  # at once, as groups may share a tensor
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for key, value in values.items():
            is_tensor = isinstance(value, Tensor) and isinstance(group.get(key), Tensor)
            group[key] = value.to(group[key].device) if is_tensor else value
    name_of = _names_by_parameter(optimizer, names)
    parts = parts_of(optimizer)
    for part, beside in zip(parts, saved.get("beside") or [{}] * len(parts), strict=True):
        live = cast("dict[Any, Any]", part.state)
        live.clear()
        live.update(deepcopy(beside))
        for group in part.param_groups:
            for parameter in group["params"]:
                state: Tree | None = saved["state"].get(name_of[parameter])
                if state is not None:
                    live[parameter] = {key: _placed(key, value, parameter, group) for key, value in state.items()}


def _names_by_parameter(optimizer: Optimizer, names: list[list[str]]) -> dict[Tensor, str]:
    return dict(zip(parameters_in(optimizer), chain.from_iterable(names), strict=True))


def _class_name(optimizer: Optimizer) -> str:
    return " + ".join(type(one).__name__ for one in parts_of(optimizer))


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    value = from_plain(value, parameter.device)
    if is_low_bit(value):
        return value
    if key == "step" and isinstance(value, Tensor):  # its device and format are the kernel's
        if group.get("fused"):
            return value.to(parameter.device, torch.float32, copy=True)
        return value.to(parameter.device, copy=True) if group.get("capturable") else value.clone()

    def placed(tensor: Tensor) -> Tensor:
        own = tensor.to(parameter.device, copy=True)
        is_plain = type(own) is Tensor and type(parameter.data) is Tensor
        return laid_out(own, parameter) if is_plain and own.shape == parameter.shape else own

    return mapped(value, placed)


def _changed(now: Tree, built: Tree) -> set[str]:
    return {key for key in now.keys() & built.keys() if not _equal(now[key], built[key])}


def _options(group: Mapping[str, Any]) -> Tree:
    return {name: value for name, value in group.items() if name != "params"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    return bool(one == other)


def _text(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, Tensor) and value.numel() == 1 else str(value)
