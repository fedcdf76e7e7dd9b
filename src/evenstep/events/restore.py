"""Gives whoever keeps state in checkpoints, hooks and tasks, what it had there, also where that was nothing.

The state is the owner's own: what is in it, and how it is taken, is for its `load_state_dict` to say.
"""

from copy import deepcopy
from typing import Any

from evenstep.errors import EvenstepError, clause


def restore_state(
    owner: Any, named: str, state: dict[str, Any], fault: type[EvenstepError], *, goes_back: bool = False
) -> Any:
    """Give `owner` the state that it had in a checkpoint; gives what its `load_state_dict` says.

    Args:
        named: what a message calls it.
        state: empty where it had none.
        fault: raised for an owner that can't begin afresh.
        goes_back: whether it may remember updates, which are undone.

    >>> class Counts:
    ...     count = 3
    ...     state_dict = lambda self: {"count": self.count}
    ...     load_state_dict = lambda self, state: vars(self).update(state)
    >>> restore_state(Counts(), "`Counts`", {}, EvenstepError, goes_back=True)
    Traceback (most recent call last):
    ...
    evenstep.errors.EvenstepError: `Counts` had no state when the checkpoint was made, and keeps the one that it has ...
    """
    before = deepcopy(owner.state_dict()) if goes_back and not state else {}
    try:
        said = owner.load_state_dict(state)
    except Exception as error:
        if state:
            raise
        raise fault(
            f"{named} had no state when the checkpoint was made, but has some now, and its `load_state_dict` raised "
            f"{clause(error)} when it was given `{{}}`; {_AFRESH}"
        ) from error
    if before and _same(before, owner.state_dict()):
        raise fault(
            f"{named} had no state when the checkpoint was made, and keeps the one that it has now when its "
            f"`load_state_dict` is given `{{}}`; {_AFRESH}"
        )
    return said


_AFRESH = "let it then begin afresh, such as by `self.value = state.get('value')`."


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "shape"):  # a tensor or an array
        return one is other or (one.shape == other.shape and bool((one == other).all()))
    return one == other
