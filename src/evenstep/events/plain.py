"""State of hooks as plain values for checkpoints, and back, such as the `Counter` of a torch scheduler."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, cast

import numpy as np


def as_plain(value: Any) -> Any:
    """`value` with dicts, lists and numbers of Python in place of their subclasses, of sets, deques and numpy's.

    >>> as_plain({"milestones": Counter([3, 3]), "seen": {1}, "best": np.float64(0.5), "last": (1, 2)})
    {'milestones': {3: 2}, 'seen': [1], 'best': 0.5, 'last': (1, 2)}
    """
    if isinstance(value, Mapping):
        return {key: as_plain(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, tuple):
        return tuple(as_plain(one) for one in cast("tuple[Any, ...]", value))
    if isinstance(value, list | set | frozenset | deque):
        return [as_plain(one) for one in cast("list[Any]", value)]
    return value.item() if isinstance(value, np.generic) else value


def like(value: Any, now: Any) -> Any:
    """A plain value in the types of `now`, the state of the same hook before it is restored.

    >>> like({"seen": [1], "last": [2, 3]}, {"seen": set(), "last": deque([], maxlen=1)})
    {'seen': {1}, 'last': deque([3], maxlen=1)}
    """
    if isinstance(value, dict):
        own = cast("Mapping[Any, Any]", now if isinstance(now, Mapping) else {})
        restored = {key: like(one, own.get(key)) for key, one in cast("dict[Any, Any]", value).items()}
        return type(now)(restored) if isinstance(now, Counter) else restored
    if isinstance(value, list):
        given = cast("list[Any]", value)
        if isinstance(now, deque):
            return deque(given, cast("deque[Any]", now).maxlen)
        if isinstance(now, set | frozenset):
            return type(cast("set[Any]", now))(given)
        own = cast("list[Any]", now if isinstance(now, list) else [])
        return [like(one, own[place] if place < len(own) else None) for place, one in enumerate(given)]
    return value
