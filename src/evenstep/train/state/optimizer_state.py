"""An optimizer's state as a tree by parameter name, and back to the bit."""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from evenstep.errors import CheckpointError
from evenstep.optim.low_bit import as_plain, from_plain, is_low_bit
from evenstep.optim.optimizers import Optimizers, parts_of
from evenstep.tensors import laid_out, parameters_in
from evenstep.train.state import Tree
from evenstep.train.state.afresh import how_to_reset

_CAST = (Optimizer.load_state_dict, Optimizers.load_state_dict)


def options_of(optimizer: Optimizer) -> list[Tree]:
    """Each group's options, as they are now."""
    return [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def plain_numbers(value: Any) -> Any:
    """An option with Python's numbers in the place of numpy's, which no checkpoint holds."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is list or type(value) is tuple:
        return type(value)(map(plain_numbers, cast("list[Any]", value)))
    return value


def make_plain(optimizer: Optimizer) -> None:
    """Let the optimizer's options be Python's numbers from the first step on, as they are in a run that is resumed."""
    for group in optimizer.param_groups:
        group.update({name: plain_numbers(value) for name, value in group.items() if name != "params"})


def optimizer_state(optimizer: Optimizer, names: list[list[str]], built: list[Tree]) -> Tree:
    """The optimizer's state by parameter name.

    Args:
        built: each group's options as of when the trainer was built, to tell later what the user has changed since.
    """
    flat = [name for group in names for name in group]
    saved = optimizer.state_dict()
    beside: Tree = {}
    state: Tree = {}
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
    groups = [{k: _saved(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    described = [
        {"parameters": list(group), "options": now, "built": then}
        for group, now, then in zip(names, groups, built, strict=True)
    ]
    tree: Tree = {"class": class_name(optimizer), "state": state, "groups": described}
    return {**tree, "beside": beside} if beside else tree


def _is_by_parameter(saved: Tree, names: list[list[str]]) -> bool:
    groups = saved.get("param_groups")
    return "state" in saved and groups is not None and [len(g["params"]) for g in groups] == [len(g) for g in names]


def class_name(optimizer: Optimizer) -> str:
    """What a checkpoint calls the optimizer.

    >>> from evenstep.optim.optimizers import joined
    >>> one, two = (torch.zeros(2, 2, requires_grad=True) for _ in range(2))
    >>> class_name(joined((torch.optim.Muon([one]), torch.optim.AdamW([two]))))
    'Muon + AdamW'
    """
    return " + ".join(type(one).__name__ for one in parts_of(optimizer))


def check_optimizer(saved: Tree, optimizer: Optimizer, names: list[list[str]]) -> None:
    """Raise CheckpointError unless the saved state is of this class of optimizer, with these groups."""
    if saved["class"] != class_name(optimizer):
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved['class']}, but this run's is {class_name(optimizer)}; resume "
            f"with the same optimizer, or let this one begin afresh: {how_to_reset('optimizer')}."
        )
    groups = [sorted(group["parameters"]) for group in saved["groups"]]
    if groups != [sorted(group) for group in names]:
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} parameter group(s) of {[len(group) for group in groups]} "
            f"parameters, but this run's has {len(names)} of {[len(group) for group in names]}, or other parameters in "
            f"them; group the parameters as in the run that saved it, or let these groups begin afresh: "
            f"{how_to_reset('optimizer')}."
        )


def changed_options(saved: Tree, built: list[Tree]) -> list[str]:
    """Messages about options, such as a learning rate, that the saved optimizer was built with other values of.

    Options that only say by which kernel a step is made are not looked at.
    """
    said: list[str] = []
    for number, (group, then) in enumerate(zip(saved["groups"], built, strict=True)):
        where = f" of group {number}" if len(built) > 1 else ""
        said += [
            f"the optimizer's `{name}`{where} was {_told(group['built'][name])} and is now {_told(then[name])}"
            for name in then.keys() & group["built"].keys() - _KERNELS
            if not _equal(then[name], group["built"][name])
        ]
    begun = [
        name
        for group, then in zip(saved["groups"], built, strict=True)
        for name in ("amsgrad", "centered", *(("momentum",) if "RMSprop" in saved["class"] else ()))
        if then.get(name) and not group["built"].get(name, True)
    ]
    if begun:
        raise CheckpointError(
            f"{'; '.join(sorted(said))}: {saved['class']} can't begin with `{begun[0]}` in mid-run, as what that needs "
            f"was not kept from the first update on. Keep what was, or let the optimizer begin afresh: "
            f"{how_to_reset('optimizer')}."
        )
    if said and "whole" in saved.get("beside", {}):
        raise CheckpointError(
            f"{'; '.join(sorted(said))}: that would have no effect, since {saved['class']} has a `state_dict` of its "
            f"own, which brings back the saved ones. Keep them, or let the optimizer begin afresh with the new ones: "
            f"{how_to_reset('optimizer')}."
        )
    return sorted(said)


_KERNELS = {"foreach", "fused", "capturable", "differentiable", "param_names"}


def load_optimizer(saved: Tree, optimizer: Optimizer, names: list[list[str]], built: list[Tree]) -> None:
    """Restore the optimizer from `optimizer_state`.

    An option (weight decay, betas) that the user has changed since the saved run was built keeps the new value; all
    others become what they were when saved.
    """
    beside: Tree = saved.get("beside", {})
    if "whole" in beside:
        optimizer.load_state_dict(deepcopy(beside["whole"]))
        return
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    saved = {**saved, "state": _of_own_classes(saved["state"], optimizer, names)}
    groups: list[Tree] = []
    for group, own, then in zip(saved["groups"], names, built, strict=True):
        options = {
            key: then[key]
            if key in then and key in group["built"] and not _equal(then[key], group["built"][key])
            else value
            for key, value in group["options"].items()
        }
        groups.append({**options, "params": [numbers[name] for name in own]})
    state: dict[Any, Any] = {numbers[name]: dict(value) for name, value in saved["state"].items()}
    kept = [_kernel(group) for group in optimizer.param_groups]
    devices = [_devices(group) for group in optimizer.param_groups]
    more = deepcopy(beside)
    state |= more.get("state", {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Casting complex values to real")  # which is put right below
        optimizer.load_state_dict({"state": state, "param_groups": groups, **more.get("entries", {})})
    for group, before in zip(optimizer.param_groups, devices, strict=True):
        group.update({key: group[key].to(device) for key, device in before.items() if isinstance(group[key], Tensor)})
    _put_right(saved, optimizer, names, [_kernel(g) == k for g, k in zip(optimizer.param_groups, kept, strict=True)])


def _of_own_classes(states: Tree, optimizer: Optimizer, names: list[list[str]]) -> Tree:
    parameters = parameters_in(optimizer)
    flat = (name for group in names for name in group)
    devices = {name: one.device for name, one in zip(flat, parameters, strict=True)}
    return {
        name: {key: from_plain(value, devices[name]) for key, value in state.items()} for name, state in states.items()
    }


def _put_right(saved: Tree, optimizer: Optimizer, names: list[list[str]], same_kernel: list[bool]) -> None:
    casts = type(optimizer).load_state_dict in _CAST
    for group, own, same in zip(optimizer.param_groups, names, same_kernel, strict=True):
        for name, parameter in zip(own, group["params"], strict=True):
            wanted: Tree = saved["state"].get(name, {})
            if not wanted or parameter not in optimizer.state:
                continue
            live: Tree = optimizer.state[parameter]
            for key, value in wanted.items():
                if key == "step" and not same:  # another kernel may want its count in another format
                    continue
                if casts or key in live:
                    live[key] = _as_parameter(_exact(value, live.get(key), parameter, casts=casts), parameter)


def _as_parameter(value: Any, parameter: Tensor) -> Any:
    if type(value) is not Tensor or value.shape != parameter.shape or type(parameter.data) is not Tensor:
        return value
    return laid_out(value, parameter)


def _exact(saved: Any, live: Any, parameter: Tensor, *, casts: bool) -> Any:
    if is_low_bit(saved):  # made for this optimizer, in memory of its own
        return saved
    if isinstance(saved, Tensor):
        if not isinstance(live, Tensor):
            return saved.to(parameter.device, copy=True) if casts else live
        if live.dtype == saved.dtype or live.shape != saved.shape:
            return live.clone() if live is saved else live
        return saved.to(live.device, copy=True)
    if isinstance(saved, dict):
        there: Tree = cast("Tree", live) if isinstance(live, dict) else {}
        kept = cast("Tree", saved)
        made = {key: _exact(value, there.get(key), parameter, casts=casts) for key, value in kept.items()}
        return made if casts else {**there, **made}
    if isinstance(saved, list | tuple):
        parts = cast("list[Any]", saved)
        old = cast("list[Any]", live) if type(live) is type(saved) and len(live) == len(parts) else [None] * len(parts)
        return type(saved)(_exact(value, one, parameter, casts=casts) for value, one in zip(parts, old, strict=True))
    return saved if casts else live


def _kernel(group: Mapping[str, Any]) -> tuple[bool, bool]:
    return bool(group.get("fused")), bool(group.get("capturable"))


def _devices(group: Mapping[str, Any]) -> dict[str, torch.device]:
    return {key: value.device for key, value in group.items() if isinstance(value, Tensor)}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    return bool(one == other)


def _told(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, Tensor) and value.numel() == 1 else str(value)


def _saved(value: Any) -> Any:
    return value if isinstance(value, np.inexact) and not isinstance(value, float) else plain_numbers(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
