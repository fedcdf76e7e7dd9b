"""State of ranks that train a model each (`Single` of several ranks), in one checkpoint."""

from torch import Tensor

from evenstep.checkpoint import Shard, outline
from evenstep.errors import CheckpointError
from evenstep.parallel import Group, mapped
from evenstep.train.state import Tree
from evenstep.train.state.pipeline_state import once_per_tensor

_OWN = ("model", "optimizer", "ema", "precision", "trained", "training", "tasks")


def of_all_ranks(state: Tree, group: Group, *, whole: bool) -> Tree:
    """State of all ranks, which call it together.

    Args:
        whole: False leaves each tensor on its rank, as a `Shard` that this rank writes.
    """
    own = {part: state[part] for part in _OWN}
    if whole:
        everybody = group.gather(own)
    else:
        everybody = group.gather(mapped(own, once_per_tensor(outline)))
        everybody[group.rank] = mapped(own, once_per_tensor(_as_shard))
    others = {str(rank): theirs for rank, theirs in enumerate(everybody) if rank}
    return {**state, **everybody[0], "each_rank": others}


def own_of(state: Tree, group: Group) -> Tree:
    """State of this rank, out of the state of all."""
    others = state.get("each_rank")
    if others is None:  # of ranks that trained one model together: all begin with it
        return state
    if len(others) + 1 != group.ranks:
        raise CheckpointError(
            f"the checkpoint is of {len(others) + 1} ranks that train a model each, but this run has {group.ranks}; "
            f"resume on as many ranks with the same hook, or begin with its weights by `load_weights`."
        )
    return {**state, **others.get(str(group.rank), {})}


def _as_shard(tensor: Tensor) -> Shard:
    return Shard(local=tensor, shape=tuple(tensor.shape), offsets=(0,) * tensor.dim())
