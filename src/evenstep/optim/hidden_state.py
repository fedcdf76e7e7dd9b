"""State that an optimizer hides: in attributes of its own, of which `state_dict` knows nothing.

Such state would be lost when a run is resumed, and nobody would say so. Plain values that steps have changed, a count
of them, say, are kept for it. Tensors are a fault that is said: at once where there is one for each parameter (slow
weights in a list) or an optimizer inside, else when one was changed; what stays as the constructor makes it, a table of
constants, is none. What functions that are put in the place of its step, or around it, keep of each parameter is said
as well. An optimizer with a `state_dict` of its own is believed to tell all that it needs, and torch's own classes hide
nothing.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import Any, cast, final
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evenstep.internals import around_step, has_state_hooks, times_written
from evenstep.names import parameters_in
from evenstep.optim.multi import inner
from evenstep.optim.sharing import TORCH

_SET_BY_SCALERS = {"grad_scale", "found_inf"}
_DEPTH = 6
_OTHER = object()


@final
class HiddenState:
    """Watches what an optimizer keeps in such attributes.

    Args:
        optimizer: as it was built, before any step.
        shared: whether ranks share its work, so that what it hides on one need not hold for another.

    >>> class Counting(torch.optim.SGD):
    ...     steps = 0
    ...     def step(self, closure=None):
    ...         self.steps += 1
    >>> hidden = HiddenState(counting := Counting([torch.zeros(1, requires_grad=True)]))
    >>> hidden.values(), counting.step(), hidden.values()
    ([{}], None, [{'steps': 1}])
    """

    def __init__(self, optimizer: Optimizer, *, shared: bool = False) -> None:
        self._optimizers = inner(optimizer)
        self._before = [_plain_values(one) for one in self._optimizers]
        self._tensors = [_tensors(one) for one in self._optimizers]
        self._built = [{name: deepcopy(_own(one)[name]) for name in _plain_values(one)} for one in self._optimizers]
        self._shared = shared

    def values(self) -> list[dict[str, Any]]:
        """Of each optimizer, the plain values of attributes that are no longer as they were: they can be kept."""
        return [
            {name: deepcopy(_own(one)[name]) for name in _changed(one, before)}
            for one, before in zip(self._optimizers, self._before, strict=True)
        ]

    def restore(self, values: list[dict[str, Any]]) -> None:
        """Set what `values` gave, and all else that has changed back to what it was when built."""
        kept = values or [{} for _ in self._optimizers]
        for one, built, before, then in zip(self._optimizers, self._built, self._before, kept, strict=True):
            for name in _changed(one, before):
                if name not in built:
                    delattr(one, name)
            for name, value in {**built, **then}.items():
                setattr(one, name, deepcopy(value))

    def fault(self) -> str:
        """What a resumed run would go on without, and what to do; "" where nothing is lost."""
        for one, before, tensors in zip(self._optimizers, self._before, self._tensors, strict=True):
            names = [name for name in _own(one) if _is_state(one, name) or _moved(one, name, tensors)]
            if self._shared:
                names += _changed(one, before)
            if names:
                return (
                    f"{type(one).__name__} keeps {', '.join(f'`{name}`' for name in names)} in attributes of its own, "
                    f"which its `state_dict` does not give, so a resumed run would go on without; keep it in "
                    f"`self.state[parameter]` or in the parameter groups, give the class `state_dict` and "
                    f"`load_state_dict` that hold it, or let the run save nothing (`keep_last=0`)"
                )
            for name, value in _around_step(one):
                if isinstance(value, Mapping | list | tuple | set | deque) and _is_of_each(one, value):
                    return (
                        f"what is called as `step` of this {type(one).__name__}, or by its hooks, keeps a tensor for "
                        f"each parameter in `{name}`, of which no `state_dict` knows, so a resumed run would go on "
                        f"without; keep it in a class of optimizer, in `self.state[parameter]`, or let the run save "
                        f"nothing (`keep_last=0`)"
                    )
        return ""


def holds_parameters(optimizer: Optimizer) -> str:
    """The attribute, if any, by which an optimizer of one's own holds its parameters beside its groups.

    >>> weight = torch.zeros(1, requires_grad=True)
    >>> sgd = torch.optim.SGD([weight])
    >>> holds_parameters(sgd)
    ''
    >>> class Holding(torch.optim.SGD): pass
    >>> holding = Holding([weight]); holding.mine = {"all": [weight]}
    >>> holds_parameters(holding)
    'mine'
    """
    for one in inner(optimizer):
        parameters = {id(parameter) for parameter in parameters_in(one)}
        for name, value in _own(one).items():
            if any(id(tensor) in parameters for tensor in tensors_in(value)):
                return name
    return ""


def tells_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a say of its own in what `state_dict` gives."""
    return has_state_hooks(optimizer) or type(optimizer).state_dict is not Optimizer.state_dict


def tensors_in(value: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """All tensors of a value: in containers, and in the attributes of objects.

    >>> [tuple(tensor.shape) for tensor in tensors_in({"a": [torch.zeros(2), 3]})]
    [(2,)]
    """
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for part in _parts(value):
            yield from tensors_in(part, depth - 1)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        return [*mapping.keys(), *mapping.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return cast("Iterable[object]", value)
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Optimizer):
        return [value.param_groups, value.state, _own(value)]
    if isinstance(value, type) or callable(value) or type(value).__module__.startswith("torch"):
        return ()
    return list(vars(value).values()) if hasattr(value, "__dict__") else ()


def _tensors(optimizer: Optimizer) -> dict[str, list[tuple[ref[Tensor], int]]]:
    """The tensors in each attribute but the parameters themselves, and how often each was changed."""
    own = {id(parameter) for parameter in parameters_in(optimizer)}
    return {
        name: [(ref(tensor), times_written(tensor)) for tensor in tensors_in(value) if id(tensor) not in own]
        for name, value in _own(optimizer).items()
    }


def _moved(optimizer: Optimizer, name: str, before: dict[str, list[tuple[ref[Tensor], int]]]) -> bool:
    """Whether tensors of an attribute are others than before, or were changed."""
    was, now = before.get(name, []), _tensors(optimizer)[name]
    return len(was) != len(now) or any(
        a() is not b() or old != new for (a, old), (b, new) in zip(was, now, strict=True)
    )


def _is_state(optimizer: Optimizer, name: str) -> bool:
    """Whether an attribute is an optimizer, or holds a tensor for each parameter."""
    value = _own(optimizer)[name]
    return any(isinstance(part, Optimizer) for part in (value, *_parts(value))) or _is_of_each(optimizer, value)


def _is_of_each(optimizer: Optimizer, value: object) -> bool:
    """Whether a value holds a tensor for each parameter, beside the parameters."""
    parameters = parameters_in(optimizer)
    own = {id(parameter) for parameter in parameters}
    shapes = Counter(tensor.shape for tensor in tensors_in(value) if id(tensor) not in own)
    return bool(parameters) and Counter(parameter.shape for parameter in parameters) <= shapes


@cache
def _ordinary() -> frozenset[str]:
    """The attributes of every optimizer, which `state_dict` gives or which are no state, as those of one of torch's."""
    scheduled = torch.optim.SGD([torch.zeros(1, requires_grad=True, device="cpu")], fused=True)
    LambdaLR(scheduled, lambda update: 1.0)
    scheduled.step()  # in which it marks what the scheduler has wrapped
    return frozenset(vars(scheduled)) | _SET_BY_SCALERS


def _own(optimizer: Optimizer) -> dict[str, object]:
    """The attributes that an optimizer of one's own has beside every optimizer's, and does not tell of itself."""
    if type(optimizer) in TORCH or tells_itself(optimizer):
        return {}
    return {name: value for name, value in vars(optimizer).items() if name not in _ordinary()}


def _around_step(optimizer: Optimizer) -> Iterator[tuple[str, object]]:
    """What the functions that are called for a step, before or after it keep beside the optimizer, by name."""
    for one in () if tells_itself(optimizer) else around_step(optimizer):
        owner, function = getattr(one, "__self__", one), getattr(one, "__func__", one)
        if not (isinstance(owner, Optimizer | nn.Module) or hasattr(owner, "state_dict")):
            yield from vars(owner).items() if hasattr(owner, "__dict__") else ()
        names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
        for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
            with suppress(ValueError):  # an empty one
                yield name, cell.cell_contents


def _plain_values(optimizer: Optimizer) -> dict[str, object]:
    values = {name: _plain(value) for name, value in _own(optimizer).items()}
    return {name: value for name, value in values.items() if value is not _OTHER}


def _changed(optimizer: Optimizer, before: dict[str, object]) -> list[str]:
    now = _plain_values(optimizer)
    return [name for name in now if now[name] != before.get(name, _plain(getattr(type(optimizer), name, _OTHER)))]


def _plain(value: object, depth: int = _DEPTH) -> object:
    """A copy of what is made of numbers and strings, to compare with; `_OTHER` for anything else.

    Also of what files hold no such thing of, numbers of numpy and deques: what has changed is refused then.
    """
    if value is None or type(value) in (bool, int, float, str):
        return type(value).__name__, value
    if isinstance(value, np.generic):
        return type(value).__name__, value.item()
    if not depth or type(value) not in (list, tuple, dict, deque):
        return _OTHER
    parts = list(cast("dict[Any, Any]", value).items()) if isinstance(value, dict) else cast("list[object]", value)
    plain = [_plain(part, depth - 1) for part in parts]
    return _OTHER if any(part is _OTHER for part in plain) else (type(value).__name__, plain)
