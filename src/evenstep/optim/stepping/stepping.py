"""Number formats of the optimizer's step; the default is that of the parameters.

A 16-bit parameter is stepped by a *stand-in*: a float32 parameter that replaces it in the optimizer during the step.
"""

from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.optim.multi import inner
from evenstep.optim.step import step


class Steps:
    """Takes an optimizer's step on the parameters as they are."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The float32 masters of the parameters that this rank steps, by name."""
        return {}

    @property
    def rounded(self) -> frozenset[str]:
        """Names of the parameters that have a master on some rank."""
        return frozenset()

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Load the masters by parameter name; the model has their rounded values already."""

    def __call__(self, optimizer: Any, update: int) -> None:
        """Take the step of update `update`."""
        step(optimizer)


@contextmanager
def standing_in(
    optimizer: Optimizer, place: Mapping[int, nn.Parameter], *, beside: Collection[int] | None = None
) -> Generator[None]:
    """Inside, the optimizer's groups hold stand-ins in place of their parameters.

    Args:
        place: stand-ins by the `id` of their parameter.
        beside: `id`s of other parameters that stay in the groups; None for all.
    """
    groups: list[dict[str, Any]] = [group for one in inner(optimizer) for group in one.param_groups]
    held = [group["params"] for group in groups]
    for group, parameters in zip(groups, held, strict=True):
        kept = parameters if beside is None else [one for one in parameters if id(one) in place or id(one) in beside]
        group["params"] = [place.get(id(one), one) for one in kept]
    try:
        yield
    finally:
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters


def widen_state(optimizer: Optimizer) -> None:
    """Cast 16-bit state that an optimizer's constructor has made to float32."""
    for one in inner(optimizer):
        for state in cast("Iterable[Any]", one.state.values()):  # of no parameter, it may be anything
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 2:
                    state[name] = value.float()


def is_narrow(parameter: Tensor) -> bool:
    """True for a parameter of 16 bits.

    >>> is_narrow(torch.zeros(1)), is_narrow(torch.zeros(1, dtype=torch.bfloat16))
    (False, True)
    """
    return parameter.dtype in (torch.bfloat16, torch.float16)
