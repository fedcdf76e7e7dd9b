"""Parameters that are one, though several layers hold a copy of them.

Each owner steps its own copy; gradients are summed over owners in the order of layers, so copies stay equal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.internals import local_tensor
from evenstep.parallel.group import Group
from evenstep.tensors import gradient_format

Tie = Mapping[str, int]
"""Ranks of the copies of one parameter by name, in the order of the layers; checkpoints have the first name."""


def equalise(ties: Sequence[Tie], parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    """Give every copy the value of the first."""
    firsts = [next(iter(tie)) for tie in ties]
    mine = {name: parameters[name].detach().cpu() for name in firsts if name in parameters}
    values = {name: value for theirs in group.gather(mine) for name, value in theirs.items()}
    with torch.no_grad():
        for first, tie in zip(firsts, ties, strict=True):
            for name in tie.keys() & parameters.keys():
                if parameters[name].shape != values[first].shape:
                    raise ArgumentError(
                        f"tied parameters must have one shape, but `{first}` has {list(values[first].shape)} and "
                        f"`{name}` {list(parameters[name].shape)}."
                    )
                parameters[name].copy_(values[first])


def sum_over_owners(ties: Sequence[Tie], parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    """Replace each copy's gradient by the sum over all: ((g₀ + g₁) + g₂) + …; a missing one is no summand."""
    own = [{name: parameters[name] for name in tie if name in parameters} for tie in ties]
    flags = {name: (one.requires_grad, one.grad is not None) for copies in own for name, one in copies.items()}
    known = {name: both for theirs in group.gather(flags) for name, both in theirs.items()}
    for tie, copies in zip(ties, own, strict=True):
        check_frozen({name: known[name][0] for name in tie})
        present = [(name, owner) for name, owner in tie.items() if known[name][1]]
        if present and copies:
            _sum_one(tie, present, copies, group)


def check_frozen(trains: Mapping[str, bool]) -> None:
    """Raise ArgumentError if some copies of one parameter are frozen; `trains` is `requires_grad` by name."""
    frozen = [name for name, one in trains.items() if not one]
    if frozen and len(frozen) < len(trains):
        raise ArgumentError(
            f"`{frozen[0]}` is frozen, but must be trained or frozen as the same parameter in other stages: set "
            f"`requires_grad` of {', '.join(f'`{name}`' for name in trains)} alike."
        )


def _sum_one(tie: Tie, present: list[tuple[str, int]], copies: Mapping[str, nn.Parameter], group: Group) -> None:
    first = next(iter(copies.values()))

    def received(rank: int) -> Tensor:
        held = local_tensor(first)
        gradient = torch.empty(held.shape, dtype=gradient_format(first), device=held.device)
        group.begin_receive(gradient, rank)()
        return gradient

    root = next(iter(tie.values()))
    waits: list[Callable[[], None]] = []
    if group.rank == root:
        gradients = (_gradient(copies[name]) if owner == root else received(owner) for name, owner in present)
        total = next(gradients).clone()
        for gradient in gradients:
            total.add_(gradient)
        waits = [group.begin_send(total, owner) for owner in sorted({*tie.values()} - {root})]
    else:
        for name, owner in present:
            if owner == group.rank:
                group.begin_send(_gradient(copies[name]).contiguous(), root)()
        total = received(root)
    for wait in waits:
        wait()
    for parameter in copies.values():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, dtype=gradient_format(parameter))
        _gradient(parameter).copy_(total)


def _gradient(parameter: Tensor) -> Tensor:
    return local_tensor(cast("Tensor", parameter.grad))
