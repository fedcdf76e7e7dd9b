"""State of ranks that train a model each (`Single` of several ranks), in one checkpoint."""

from typing import Any

from torch import Tensor

from evenstep.checkpoint import Shard, outline
from evenstep.errors import CheckpointError
from evenstep.parallel import Group, mapped
from evenstep.train.state import Tree

_OWN = ("model", "optimizer", "ema", "precision", "trained", "tasks")


def of_all_ranks(state: Tree, group: Group, *, whole: bool) -> Tree:
    """State of all ranks; all call it together.

    Args:
        whole: False to leave each tensor on its rank, as a `Shard` that this rank writes.
    """
    own = {part: state[part] for part in _OWN}
    if whole:
        everybody = group.gather(own)
    else:
        everybody = group.gather(_mapped(own, outline))
        everybody[group.rank] = _mapped(own, _block)
    others = {str(rank): theirs for rank, theirs in enumerate(everybody) if rank}
    return {**state, **everybody[0], "each_rank": others}


def of_one_rank(state: Tree, rank: int) -> Tree:
    """The part of the state that `rank` holds, without asking the others."""
    if not rank:
        return {**state, "each_rank": {}}
    empty = {part: {} for part in ("model", "ema", "trained")}
    own = {part: state[part] for part in _OWN}
    return {**state, **empty, "optimizer": {**state["optimizer"], "state": {}}, "each_rank": {str(rank): own}}


def own_of(state: Tree, group: Group) -> Tree:
    """The state of this rank among `group`, the ranks that train a model each."""
    others = state.get("each_rank")
    if others is None:  # saved by ranks that trained one model together: all begin with it
        return state
    if len(others) + 1 != group.ranks:
        raise CheckpointError(
            f"the checkpoint is of {len(others) + 1} ranks that train a model each, but this run has {group.ranks}; "
            f"resume on as many ranks with the same hook, or begin with its weights by `load_weights`."
        )
    return {**state, **others.get(str(group.rank), {})}


def _mapped(own: Tree, act: Any) -> Tree:
    made: dict[object, Shard] = {}

    def once(tensor: Tensor) -> Shard:
        key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        return made.setdefault(key if tensor.numel() else id(tensor), act(tensor))

    return mapped(own, once)


def _block(tensor: Tensor) -> Shard:
    return Shard(local=tensor, shape=tuple(tensor.shape), offsets=(0,) * tensor.dim())
