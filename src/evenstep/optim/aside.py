"""What an optimizer keeps aside: in attributes of its own, of which `state_dict` knows nothing.

Such state is lost when a run is resumed, and nobody says so: slow weights in a list, an optimizer inside another, a
count of steps. Tensors are seen at once; what is a plain value is seen when a step has changed it. An optimizer with a
`state_dict` of its own is believed to tell all that it needs, and torch's own classes keep nothing aside.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.optim.multi import inner
from evenstep.optim.sharing import TORCH

_SET_BY_OTHERS = {"grad_scale", "found_inf", "step", "_opt_called", "_step_supports_amp_scaling"}
_DEPTH = 6


@final
class Aside:
    """Watches what an optimizer keeps aside.

    Args:
        optimizer: as it was built, before any step.

    >>> class Counting(torch.optim.SGD):
    ...     steps = 0
    ...     def step(self, closure=None):
    ...         self.steps += 1
    >>> aside = Aside(counting := Counting([torch.zeros(1, requires_grad=True)]))
    >>> aside.names(), counting.step(), aside.names()
    ([], None, ['steps'])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._watched = [one for one in inner(optimizer) if type(one) not in TORCH and not tells_itself(one)]
        self._before = [_plain_values(one) for one in self._watched]

    def names(self) -> list[str]:
        """The attributes that hold tensors, or values that are no longer as they were."""
        found: dict[str, None] = {}
        for one, before in zip(self._watched, self._before, strict=True):
            found |= dict.fromkeys(name for name, value in _own(one).items() if _holds_tensors(value))
            now = _plain_values(one)
            found |= dict.fromkeys(name for name in now if now[name] != before.get(name, _default(one, name)))
        return list(found)

    def fault(self) -> str:
        """What a resumed run would go on without, and what to do; "" where nothing is lost."""
        names = self.names()
        if not names:
            return ""
        kinds = " and ".join(type(one).__name__ for one in self._watched)
        kept = ", ".join(f"`{name}`" for name in names)
        return (
            f"{kinds} keeps {kept} in attributes of its own, which its `state_dict` does not give, so a resumed run "
            f"would go on without; keep it in `self.state[parameter]` or in the parameter groups, give the class "
            f"`state_dict` and `load_state_dict` that hold it, or let the run save nothing (`keep_checkpoints=0`)"
        )


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
        if type(one) in TORCH:
            continue
        parameters = {id(parameter) for group in one.param_groups for parameter in group["params"]}
        for name, value in _own(one).items():
            if any(id(tensor) in parameters for tensor in tensors_in(value)):
                return name
    return ""


def tells_itself(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a say of its own in what `state_dict` gives."""
    hooks = cast("Any", optimizer)._optimizer_state_dict_post_hooks
    return bool(hooks) or type(optimizer).state_dict is not Optimizer.state_dict


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


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Optimizer) or any(True for _ in tensors_in(value))


@cache
def _ordinary() -> frozenset[str]:
    """The attributes of every optimizer, which `state_dict` gives or which are no state."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))) | _SET_BY_OTHERS


def _own(optimizer: Optimizer) -> dict[str, object]:
    return {name: value for name, value in vars(optimizer).items() if name not in _ordinary()}


def _default(optimizer: Optimizer, name: str) -> object:
    return _plain(getattr(type(optimizer), name, None))


def _plain_values(optimizer: Optimizer) -> dict[str, object]:
    values = {name: _plain(value) for name, value in _own(optimizer).items()}
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: object, depth: int = _DEPTH) -> object:
    """A copy of what is made of numbers and strings; None for anything else."""
    if isinstance(value, bool | int | float | complex | str):
        return type(value).__name__, value
    if not depth or not isinstance(value, list | tuple | Mapping | deque):
        return None
    parts = cast("Any", list(cast("Mapping[Any, Any]", value).items()) if isinstance(value, Mapping) else value)
    return type(value).__name__, [_plain(part, depth - 1) for part in parts]
