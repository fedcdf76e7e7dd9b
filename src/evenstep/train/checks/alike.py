"""Checks that all ranks were given the same, by what each says of it; what differs is named with both values.

Ranks agree on the model, and on how they share it, before anything of it is sent: tensors of other sizes can end a
process in the midst of a collective. What else they must have in common is asked when they are about to train.
"""

from collections.abc import Iterable
from itertools import chain
from typing import cast

import torch
from torch import nn

from evenstep.errors import ReplicaError
from evenstep.internals import unwrapped
from evenstep.parallel import Group, Strategy


def check_shared(model: nn.Module, strategy: Strategy) -> None:
    """Raise ReplicaError unless all ranks are about to share the same model in the same way; all call it together.

    Nothing of the model has been sent yet: tensors of other sizes can end a process within the collective.
    """
    check_same_on_all_ranks(
        strategy.group,
        {
            "strategy": _names(strategy),
            "model": {
                **{f"{name or 'itself'}": type(module).__name__ for name, module in unwrapped(model).named_modules()},
                **{name: _format(tensor) for name, tensor in _tensors(unwrapped(model))},
            },
        },
    )


def _names(strategy: Strategy) -> list[str]:
    """What it is called, and what those are that it has inside.

    >>> from evenstep.parallel import Ordered, Zero1
    >>> _names(Zero1(Ordered()))
    ['Zero1', 'Ordered']
    """
    inner = (one for one in vars(strategy).values() if isinstance(one, Strategy))
    return [type(strategy).__name__, *(name for one in inner for name in _names(one))]


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _format(tensor: torch.Tensor) -> str:
    """The shape and the number format.

    >>> _format(torch.zeros(2, 3))
    'float32 [2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_same_on_all_ranks(group: Group, described: dict[str, object]) -> None:
    """Raise ReplicaError unless all ranks describe the same run; the message names rank and what differs."""
    everybody = group.gather(described)
    for rank, theirs in enumerate(everybody):
        found = _difference("", theirs, everybody[0])
        if found is not None:
            name, value, first = found
            raise ReplicaError(
                f"all ranks must train the same run, but `{name}` is {_short(value)} on rank {rank} and "
                f"{_short(first)} on rank 0; give all ranks the same files, versions and settings."
            )


_ABSENT = "absent"


def _difference(name: str, one: object, other: object) -> tuple[str, object, object] | None:
    """The first place in which two descriptions differ, by its name, and what each has there; None if they don't.

    >>> _difference("data", {"size": 8, "shuffle": True}, {"size": 8, "shuffle": False})
    ('data.shuffle', True, False)
    """
    if one == other:
        return None
    if not isinstance(one, dict) or not isinstance(other, dict):
        return name, one, other
    mine, theirs = cast("dict[str, object]", one), cast("dict[str, object]", other)
    for key in {**theirs, **mine}:
        found = _difference(f"{name}.{key}" if name else key, mine.get(key, _ABSENT), theirs.get(key, _ABSENT))
        if found is not None:
            return found
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
