"""The stepper of a run owns its optimizer: nobody else calls `step`.

If memory runs out before a step has written anything, unused memory is freed and the step is taken once more.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from evenstep.errors import ArgumentError, OutOfMemoryError
from evenstep.internals import takes_scale, times_written
from evenstep.oom import give_back, is_out_of_memory
from evenstep.optim.fused import take_step
from evenstep.optim.multi import inner
from evenstep.tensors import parameters_in


class Stepper:
    """Takes the steps of an optimizer on the parameters as they are.

    Args:
        optimizer: optimizer of the parameters that this rank steps.

    Attributes:
        masters: float32 masters of the parameters that this rank steps, by name.
        rounded: names of the parameters that have a master on some rank.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.masters: Mapping[str, Tensor] = {}
        self.rounded: frozenset[str] = frozenset()

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Load the masters by parameter name; the model has their rounded values already."""

    def step(self, update: int) -> None:
        """Take the step of update `update`.

        Raises:
            OutOfMemoryError: there is no memory for the step, or it stopped half-way; the message says which.
        """
        self._take_step()

    def _take_step(self) -> None:
        optimizer: Any = self.optimizer
        for one in inner(self.optimizer):
            if isinstance(one, SGD):
                _create_missing_momentum(one)
        if optimizer.state and takes_scale(optimizer):  # a kernel that allocates nothing
            take_step(optimizer)
            return
        before = {id(tensor): times_written(tensor) for tensor in _tensors_of(optimizer)}
        fault = ""
        for _ in range(2):
            try:
                take_step(optimizer)
                return
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                fault = str(error).splitlines()[0] if str(error) else type(error).__name__
            give_back()
            if any(times_written(tensor) != before.get(id(tensor), 0) for tensor in _tensors_of(optimizer)):
                raise OutOfMemoryError(
                    f"memory ran out in the midst of the optimizer's step ({fault}): some parameters are changed, "
                    f"others not. Resume from the last checkpoint with smaller micro-batches or a fused optimizer."
                )
        raise OutOfMemoryError(
            f"there is no memory for the optimizer's step ({fault}); nothing was changed. Use smaller micro-batches, "
            f"a fused optimizer, or one with less state."
        )


def _tensors_of(optimizer: Any) -> list[Tensor]:
    return [*parameters_in(optimizer), *_tensors_in(optimizer.state)]


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    for part in tree.values() if isinstance(tree, Mapping) else tree:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, dict | list | tuple):
            yield from _tensors_in(part)


def _create_missing_momentum(optimizer: SGD) -> None:
    """Momentum of 0 for parameters whose first gradient comes after that of others.

    The fused kernel takes no parameter without momentum beside one with it. From 0, the first momentum is the gradient.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or not group["momentum"]:
            continue
        moving = [one for one in group["params"] if one.grad is not None]
        late = [one for one in moving if optimizer.state.get(one, {}).get("momentum_buffer") is None]
        if not late or len(late) == len(moving):
            continue
        if group["dampening"]:
            raise ArgumentError(
                f"a parameter of shape {list(late[0].shape)} has its first gradient later than others, which torch's "
                f"fused SGD can't step with a `dampening`; build it with `fused=False`.",
                field="optimizer",
            )
        for one in late:
            optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)


@contextmanager
def swapped_parameters(
    optimizer: Optimizer, place: Mapping[int, nn.Parameter], *, beside: Collection[int] | None = None
) -> Generator[None]:
    """Inside, the optimizer's groups hold other parameters in place of their own.

    Args:
        place: the other parameters by the `id` of the own one.
        beside: `id`s of own parameters that stay in the groups; None for all.
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
        for state in cast("Iterable[Any]", one.state.values()):
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 2:
                    state[name] = value.float()


def is_narrow(parameter: Tensor) -> bool:
    """True for a parameter of 16 bits.

    >>> is_narrow(torch.zeros(1)), is_narrow(torch.zeros(1, dtype=torch.bfloat16))
    (False, True)
    """
    return parameter.dtype in (torch.bfloat16, torch.float16)
