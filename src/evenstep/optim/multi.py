"""Several optimizers over one model as one: Muon for the matrices and AdamW for the rest, say.

Its parameter groups and state are those of all its optimizers, in their order.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, cast, final

import torch
from torch.optim import Optimizer

from evenstep.errors import ArgumentError
from evenstep.internals import TAKES_SCALE, takes_scale
from evenstep.optim.fused import take_step
from evenstep.tensors import parameters_in

Group = dict[str, Any]


@final
class MultiOptimizer(Optimizer):
    """Steps several optimizers together; a `Trainer` makes one of a tuple of optimizers.

    A learning rate schedule multiplies each group's own learning rate. Loss scale and clipping are done inside the
    kernels where those of all optimizers can (`fused=True`), else before them.

    Args:
        optimizers: optimizers of different parameters, with their state per parameter as in `torch.optim`. Parameters
            that are added later go to the last. A `MultiOptimizer` among them is replaced by its optimizers.

    Attributes:
        optimizers: the optimizers, in their order.

    Raises:
        ArgumentError: a parameter is in two optimizers, or an optimizer has its own `state_dict`.

    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = MultiOptimizer(torch.optim.Muon([model.weight], lr=0.02), torch.optim.AdamW([model.bias], lr=1e-3))
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.02, 0.001]
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, *optimizers: Optimizer) -> None:
        optimizers = tuple(one for given in optimizers for one in inner(given))
        _check(optimizers)
        # torch's own constructor would make another state and other groups
        scales = all(takes_scale(one) for one in optimizers)
        self.__setstate__({"optimizers": optimizers, "defaults": dict(optimizers[-1].defaults), TAKES_SCALE: scales})

    @property
    def param_groups(self) -> list[Group]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all optimizers."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> "MutableMapping[Any, Any]":  # pyright: ignore[reportIncompatibleVariableOverride]
        """The joined state of all optimizers."""
        return _JoinedState(self.optimizers)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the last optimizer."""
        self.optimizers[-1].add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step all optimizers, in their order.

        Args:
            closure: evaluated once, before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for_kernels = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        for one in self.optimizers:
            vars(one).update(for_kernels)
            try:
                take_step(one)
            finally:
                for name in for_kernels:
                    del vars(one)[name]
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict()` of like optimizers; ValueError if the number of groups differs."""
        groups = cast("list[Group]", state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} parameter groups, but there are {len(self.param_groups)}.")
        saved = cast("dict[Any, Any]", state_dict["state"])
        begin = 0
        for place, one in enumerate(self.optimizers):
            own = groups[begin : begin + len(one.param_groups)]
            begin += len(own)
            numbers = {number for group in own for number in group["params"]}
            state = {key: value for key, value in saved.items() if key in numbers}
            for key, value in saved.items():
                if isinstance(key, str) and _place_and_name(key)[0] == place:
                    state[_place_and_name(key)[1]] = value
            one.load_state_dict({"state": state, "param_groups": own})

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optimizers", "defaults", TAKES_SCALE)}


def inner(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers of a `MultiOptimizer`, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else (optimizer,)


def joined(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """A tuple of optimizers as one; an optimizer itself."""
    return MultiOptimizer(*optimizer) if isinstance(optimizer, list | tuple) else cast("Optimizer", optimizer)


class _JoinedState(MutableMapping[Any, Any]):
    """State by parameter; other entries have the number of their optimizer before their name."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, key: Any) -> Any:
        state, own = self._of(key)
        return state[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        state, own = self._of(key)
        state[own] = value

    def __delitem__(self, key: Any) -> None:
        state, own = self._of(key)
        del state[own]

    def __contains__(self, key: object) -> bool:
        return key in [*self] if isinstance(key, str) else any(key in one.state for one in self._optimizers)

    def __iter__(self) -> Iterator[Any]:
        for place, one in enumerate(self._optimizers):
            for key in one.state:
                yield f"{place}.{key}" if isinstance(key, str) else key

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)

    def _of(self, key: Any) -> tuple[MutableMapping[Any, Any], Any]:
        if isinstance(key, str):
            place, name = _place_and_name(key)
            return self._optimizers[place].state, name
        for one in self._optimizers:
            if key in one.state or any(key is parameter for parameter in parameters_in(one)):
                return one.state, key
        raise KeyError(key)


def _place_and_name(key: str) -> tuple[int, str]:
    place, _, name = key.partition(".")
    return int(place), name


def _check(optimizers: Sequence[Optimizer]) -> None:
    owners: dict[int, Optimizer] = {}
    for one in optimizers:
        name = type(one).__name__
        if type(one).state_dict is not Optimizer.state_dict:
            raise ArgumentError(
                f"optimizers that are joined save their `state`, but {name} has its own `state_dict`; leave it out.",
                field="optimizer",
            )
        for parameter in parameters_in(one):
            owner = owners.setdefault(id(parameter), one)
            if owner is not one:
                raise ArgumentError(
                    f"each parameter must have one optimizer, but one of shape {list(parameter.shape)} is in "
                    f"{type(owner).__name__} and in {name}; give each parameter to one of them.",
                    field="optimizer",
                )
