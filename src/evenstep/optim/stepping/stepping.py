"""In which format the optimizer takes its step: the seam, whose default steps the parameters as they are.

A parameter of 16 bits is stepped in float32, by a *stand-in*: a float32 parameter that the optimizer holds in its place
for the time of the step, with its gradient and its state. Outside of steps the optimizer holds the model's parameters,
so names, groups, checkpoints and ranks need not know of stand-ins.
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
        """The float32 values of which the model holds rounded ones: those that this rank steps, by parameter name."""
        return {}

    @property
    def rounded(self) -> frozenset[str]:
        """The names of all parameters that have a master on some rank."""
        return frozenset()

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Take the masters from parameters by name, of which the model holds the rounded values already."""

    def __call__(self, optimizer: Any, update: int) -> None:
        """Take the step of update `update`.

        Raises:
            OutOfMemoryError: there is no room for it; see `step`.
        """
        step(optimizer)


@contextmanager
def standing_in(
    optimizer: Optimizer, place: Mapping[int, nn.Parameter], *, beside: Collection[int] | None = None
) -> Generator[None]:
    """Inside, the optimizer's groups hold stand-ins in place of their parameters.

    Args:
        place: the stand-ins, by the `id`s of the parameters.
        beside: the `id`s of the other parameters that it holds inside; None for all.
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
    """Make float32 what an optimizer has made of 16-bit parameters when it was built: it steps in float32."""
    for one in inner(optimizer):
        for state in cast("Iterable[Any]", one.state.values()):  # of no parameter, it may be anything
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 2:
                    state[name] = value.float()


def is_narrow(parameter: Tensor) -> bool:
    """Whether a parameter is of 16 bits.

    >>> is_narrow(torch.zeros(1)), is_narrow(torch.zeros(1, dtype=torch.bfloat16))
    (False, True)
    """
    return parameter.dtype in (torch.bfloat16, torch.float16)
