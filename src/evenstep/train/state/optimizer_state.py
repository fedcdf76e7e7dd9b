"""State of an optimizer as a tree by parameter name, and its assignment to the bit.

class     name of the class
state     tensors and plain values by parameter name
groups    of each group: names of its parameters, its options now, and its options when the trainer was built
beside    optional: other keys of the state, other entries of its `state_dict`, or the whole of a `state_dict` that
          is not by parameter
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from evenstep.errors import CheckpointError
from evenstep.optim.low_bit import as_plain, from_plain, is_low_bit
from evenstep.optim.optimizers import parts_of
from evenstep.parallel import mapped
from evenstep.tensors import laid_out, parameters_in
from evenstep.train.state import Tree
from evenstep.train.state.resets import how_to_reset

_KERNEL_OPTIONS = {"foreach", "fused", "capturable", "differentiable", "param_names"}


def options_of(optimizer: Optimizer) -> list[Tree]:
    """Options of each group, copied."""
    return [mapped(_options(group), lambda value: value.detach().clone()) for group in optimizer.param_groups]


def make_plain(optimizer: Optimizer) -> None:
    """Turn numpy numbers among the options into Python's, as they are after a resume."""
    for group in optimizer.param_groups:
        group.update(_plain_options(group))


def optimizer_state(optimizer: Optimizer, names: list[list[str]], built: list[Tree]) -> Tree:
    """State of the optimizer by parameter name.

    Args:
        names: of the parameters of each group.
        built: options of each group when the trainer was built; a later run compares its own with them.
    """
    flat = [name for group in names for name in group]
    saved = optimizer.state_dict()
    state: Tree = {}
    beside: Tree = {}
    if _is_by_parameter(saved, names):
        for key, value in saved["state"].items():
            if isinstance(key, int):
                state[flat[key]] = {name: as_plain(one) for name, one in value.items()}
            else:
                beside.setdefault("state", {})[key] = value
        entries = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        if entries:
            beside["entries"] = entries
    else:
        beside["whole"] = saved
    groups = [
        {"parameters": list(own), "options": _plain_options(group), "built": then}
        for group, own, then in zip(optimizer.param_groups, names, built, strict=True)
    ]
    tree: Tree = {"class": class_name(optimizer), "state": state, "groups": groups}
    return {**tree, "beside": beside} if beside else tree


def class_name(optimizer: Optimizer) -> str:
    """Name of an optimizer's class in a checkpoint.

    >>> from evenstep.optim.optimizers import joined
    >>> one, two = (torch.zeros(2, 2, requires_grad=True) for _ in range(2))
    >>> class_name(joined((torch.optim.Muon([one]), torch.optim.AdamW([two]))))
    'Muon + AdamW'
    """
    return " + ".join(type(one).__name__ for one in parts_of(optimizer))


def check_optimizer(saved: Tree, optimizer: Optimizer, names: list[list[str]]) -> None:
    """Raise CheckpointError unless the saved state is of the same class and groups."""
    if saved["class"] != class_name(optimizer):
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved['class']}, but this run's is {class_name(optimizer)}; resume "
            f"with the same optimizer, or reset it: {how_to_reset('optimizer')}."
        )
    groups = [sorted(group["parameters"]) for group in saved["groups"]]
    if groups != [sorted(group) for group in names]:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {[len(group) for group in groups]} parameters, but this run's "
            f"has groups of {[len(group) for group in names]}, or of other parameters; group them as in the run that "
            f"saved it, or reset the optimizer: {how_to_reset('optimizer')}."
        )


def changed_options(saved: Tree, built: list[Tree]) -> list[str]:
    """Options, such as a weight decay, that this optimizer was built with other values of; one text each.

    Raises:
        CheckpointError: an option that can't change in the midst of a run.
    """
    said: list[str] = []
    begun: list[str] = []
    needs_start = {"amsgrad", "centered"} | ({"momentum"} if "RMSprop" in saved["class"] else set[str]())
    for number, (group, now) in enumerate(zip(saved["groups"], built, strict=True)):
        where = f" of group {number}" if len(built) > 1 else ""
        for name in sorted(now.keys() & group["built"].keys() - _KERNEL_OPTIONS):
            was = group["built"][name]
            if not _equal(now[name], was):
                said.append(f"the optimizer's `{name}`{where} was {_text(was)} and is now {_text(now[name])}")
                if name in needs_start and not was:
                    begun.append(name)
    if begun or (said and "whole" in saved.get("beside", {})):
        why = f"`{begun[0]}` needs sums from the first update on" if begun else "its own `state_dict` restores the old"
        raise CheckpointError(
            f"{'; '.join(said)}, but {why}. Keep the old value, or reset the optimizer: {how_to_reset('optimizer')}."
        )
    return said


def load_optimizer(saved: Tree, optimizer: Optimizer, names: list[list[str]], built: list[Tree]) -> None:
    """Assign a state of `optimizer_state`, by name and in the saved formats.

    An option that was built with another value than in the saved run keeps its new value.
    """
    beside: Tree = deepcopy(saved.get("beside", {}))
    if "whole" in beside:
        optimizer.load_state_dict(beside["whole"])
        return
    # copied at once, as groups may share a tensor
    options = deepcopy([_merged(group, then) for group, then in zip(saved["groups"], built, strict=True)])
    parts = parts_of(optimizer)
    first = 0
    for place, part in enumerate(parts):
        own = slice(first, first + len(part.param_groups))
        first = own.stop
        prefix = f"{place}." if len(parts) > 1 else ""
        more = {k.removeprefix(prefix): v for k, v in beside.get("state", {}).items() if str(k).startswith(prefix)}
        if type(part).load_state_dict is Optimizer.load_state_dict:
            _assign(part, names[own], options[own], saved["state"], more)
        else:
            _load_by_its_method(part, names[own], options[own], saved["state"], more, beside.get("entries", {}))


def _assign(optimizer: Optimizer, names: list[list[str]], options: list[Tree], states: Tree, more: Tree) -> None:
    live = cast("dict[Any, Any]", optimizer.state)
    live.clear()
    live.update(more)
    for group, own, values in zip(optimizer.param_groups, names, options, strict=True):
        for key, value in values.items():
            is_tensor = isinstance(value, Tensor) and isinstance(group.get(key), Tensor)
            group[key] = value.to(group[key].device) if is_tensor else value
        for name, parameter in zip(own, group["params"], strict=True):
            if name in states:
                state: Tree = states[name]
                live[parameter] = {key: _placed(key, one, parameter, group) for key, one in state.items()}


def _load_by_its_method(
    optimizer: Optimizer, names: list[list[str]], options: list[Tree], states: Tree, more: Tree, entries: Tree
) -> None:
    parameters = parameters_in(optimizer)
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    state: dict[Any, Any] = {
        number: {key: from_plain(one, parameters[number].device) for key, one in states[name].items()}
        for name, number in numbers.items()
        if name in states
    }
    groups = [{**values, "params": [numbers[name] for name in own]} for own, values in zip(names, options, strict=True)]
    optimizer.load_state_dict({"state": {**state, **more}, "param_groups": groups, **entries})
    for number, parameter in enumerate(parameters):  # it may have called torch's, which casts to the parameter's format
        live = optimizer.state.get(parameter, {})
        for key, value in state.get(number, {}).items():
            there = live.get(key)
            if isinstance(there, Tensor) and there.dtype != value.dtype and there.shape == value.shape:
                live[key] = value.to(there.device, copy=True)


def _placed(key: str, value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    value = from_plain(value, parameter.device)
    if is_low_bit(value):
        return value
    if key == "step" and isinstance(value, Tensor):  # its device and format are the kernel's
        if group.get("fused"):
            return value.to(parameter.device, torch.float32, copy=True)
        return value.to(parameter.device, copy=True) if group.get("capturable") else value.clone()
    return mapped(value, lambda tensor: _like_parameter(tensor.to(parameter.device, copy=True), parameter))


def _like_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    is_plain = type(value) is Tensor and type(parameter.data) is Tensor
    return laid_out(value, parameter) if is_plain and value.shape == parameter.shape else value


def _is_by_parameter(saved: Tree, names: list[list[str]]) -> bool:
    groups = saved.get("param_groups")
    return "state" in saved and groups is not None and [len(g["params"]) for g in groups] == [len(g) for g in names]


def _merged(group: Tree, then: Tree) -> Tree:
    changed = {key for key in then.keys() & group["built"].keys() if not _equal(then[key], group["built"][key])}
    return {key: then[key] if key in changed else value for key, value in group["options"].items()}


def _options(group: Mapping[str, Any]) -> Tree:
    return {name: value for name, value in group.items() if name != "params"}


def _plain_options(group: Mapping[str, Any]) -> Tree:
    return {name: _plain_numbers(value) for name, value in _options(group).items()}


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_plain_numbers, cast("list[Any]", value)))
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    return bool(one == other)


def _text(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, Tensor) and value.numel() == 1 else str(value)
