"""Parameters that are one, though several layers hold a copy of them.

Each owner steps its own copy; gradients are summed over owners in the order of layers, so copies stay equal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.internals import local_tensor
from evenstep.parallel.group import Group
from evenstep.tensors import gradient_format


class Tie(NamedTuple):
    """One tied parameter: its names, in the order of the layers, and their ranks. Checkpoints have the first name."""

    names: tuple[str, ...]
    owners: tuple[int, ...]


def equalise(ties: Sequence[Tie], parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    """Give every copy the value of the first."""
    if not ties:
        return
    firsts = {tie.names[0]: parameters[tie.names[0]].detach().cpu() for tie in ties if tie.owners[0] == group.rank}
    values = {name: value for theirs in group.gather(firsts) for name, value in theirs.items()}
    with torch.no_grad():
        for tie in ties:
            value = values[tie.names[0]]
            for name in tie.names:
                if name in parameters and parameters[name].shape != value.shape:
                    raise ArgumentError(
                        f"tied parameters must have one shape, but `{tie.names[0]}` has {list(value.shape)} and "
                        f"`{name}` {list(parameters[name].shape)}."
                    )
                if name in parameters:
                    parameters[name].copy_(value)


def sum_over_owners(ties: Sequence[Tie], parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    """Replace each copy's gradient by the sum over all: ((g₀ + g₁) + g₂) + …; a missing one is no summand."""
    if not ties:
        return
    own = [{name: parameters[name] for name in tie.names if name in parameters} for tie in ties]
    mine = [{name: (one.requires_grad, one.grad is not None) for name, one in copies.items()} for copies in own]
    everybody = group.gather(mine)
    for number, tie in enumerate(ties):
        known = {name: flags for theirs in everybody for name, flags in theirs[number].items()}
        check_frozen({name: trains for name, (trains, _) in known.items()})
        _sum_one(tie, {name for name, (_, is_there) in known.items() if is_there}, parameters, group)


def check_frozen(trains: Mapping[str, bool]) -> None:
    """Raise ArgumentError if some copies of one parameter are frozen; `trains` is `requires_grad` by name."""
    frozen = [name for name, one in trains.items() if not one]
    if frozen and len(frozen) < len(trains):
        raise ArgumentError(
            f"`{frozen[0]}` is frozen, but must be trained or frozen as the same parameter in other stages: set "
            f"`requires_grad` of {', '.join(f'`{name}`' for name in trains)} alike."
        )


def _sum_one(tie: Tie, present: set[str], parameters: Mapping[str, nn.Parameter], group: Group) -> None:
    owners = [(name, owner) for name, owner in zip(tie.names, tie.owners, strict=True) if name in present]
    if not owners:
        return
    root, total = tie.owners[0], None
    waits: list[Callable[[], None]] = []
    if group.rank == root:
        like = _like(parameters[tie.names[0]])
        for name, owner in owners:
            gradient = _held(parameters[name].grad) if owner == root else _received(like, owner, group)
            total = gradient.clone() if total is None else total.add_(gradient)
        assert total is not None
        waits = [group.begin_send(total, owner) for owner in sorted(set(tie.owners) - {root})]
    elif group.rank in tie.owners:
        like = _like(next(parameters[name] for name in tie.names if name in parameters))
        for name, owner in owners:
            if owner == group.rank:
                group.begin_send(_held(parameters[name].grad).contiguous(), root)()
        total = _received(like, root, group)
    for wait in waits:
        wait()
    for name in tie.names:
        if name in parameters and total is not None:
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, dtype=gradient_format(parameter))
            _held(parameter.grad).copy_(total)


def _held(tensor: Any) -> Tensor:
    return local_tensor(tensor)


def _like(parameter: Tensor) -> Tensor:
    held = _held(parameter)
    return torch.empty((), dtype=gradient_format(parameter), device=held.device).expand(held.shape)


def _received(like: Tensor, rank: int, group: Group) -> Tensor:
    gradient = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    group.begin_receive(gradient, rank)()
    return gradient
