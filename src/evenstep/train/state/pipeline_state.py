"""State of the stages on pipeline ranks: gathered for a checkpoint, and taken out of a whole state."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from evenstep.checkpoint import Shard, is_sharded, outline
from evenstep.parallel import mapped
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.wire import Address, Wire
from evenstep.tensors import named_buffers, named_parameters, state_of
from evenstep.train.randomness import in_order
from evenstep.train.state import Tree

T = TypeVar("T")
_LEAVES = (Tensor, Shard)


def gathered(model: PipelineModel, wire: Wire, state: Tree) -> Tree:
    """The whole state on the first rank of the first pipeline; this rank's own on the others.

    Where tensors are cut over ranks, each rank gives its own, and an empty `Shard` for each tensor of another.
    """
    pipeline = model.mesh.pipeline
    leaves: list[object] = []
    mapped(state, leaves.append, _LEAVES)
    if any(pipeline.gather(any(map(is_sharded, leaves)))):
        states = pipeline.gather(mapped(state, once_per_tensor(outline), _LEAVES))
        states[pipeline.rank] = state
        return _merged(model, states)
    if model.mesh.data.rank:
        return state
    if pipeline.rank:
        wire.send(_address(pipeline.rank), state, 0)
        wire.flush()
        return state
    return _merged(model, [state, *(wire.receive(_address(rank), rank) for rank in range(1, pipeline.ranks))])


def own_stages(model: PipelineModel, state: Tree) -> Tree:
    """This rank's part of a whole state; all ranks of the pipeline call it together."""
    mine = state_of(model)
    known = {name for names in model.mesh.pipeline.gather(set(mine)) for name in names}
    trained, aliases = list(named_parameters(model)), model.aliases

    def under(names: Iterable[str], values: Mapping[str, T]) -> dict[str, T]:
        stored = {name: aliases.get(name, name) for name in names}
        return {name: values[one] for name, one in stored.items() if one in values}

    own = {
        **state,
        "model": {name: value for name, value in state["model"].items() if name in mine or name not in known},
        "ema": under([*trained, *named_buffers(model)], state["ema"]),
        "trained": under(trained, state["trained"]),
    }
    if "optimizer" in state:
        saved: Tree = state["optimizer"]
        groups = [
            {**group, "parameters": list(under(trained, dict.fromkeys(group["parameters"])))}
            for group in saved["groups"]
        ]
        # copies of a tied parameter must not share memory
        states = {name: mapped(one, _copy) for name, one in under(trained, saved["state"]).items()}
        own["optimizer"] = {**saved, "state": states, "groups": groups}
    return own


def _merged(model: PipelineModel, states: list[Tree]) -> Tree:
    aliases = model.aliases

    def ordered(names: Iterable[str]) -> list[str]:
        return in_order(model, [name for name in names if name not in aliases])

    def union(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
        return {name: value for part in parts for name, value in part.items()}

    groups: list[Tree] = []
    for same in zip(*(state["optimizer"]["groups"] for state in states), strict=True):
        names = (name for group in same for name in group["parameters"])
        groups.append({**same[0], "parameters": ordered(names)})
    states_of = union(state["optimizer"]["state"] for state in states)
    averages = union(state["ema"] for state in states)
    values = union(state["model"] for state in states)
    return {
        **states[0],
        "model": {name: values[name] for name in in_order(model, values)},
        "optimizer": {
            **states[0]["optimizer"],
            "state": {name: states_of[name] for name in ordered(states_of)},
            "groups": groups,
        },
        "ema": {name: averages[name] for name in ordered(averages)},
        "trained": union(state["trained"] for state in states),
        "training": union(state["training"] for state in states),
    }


def once_per_tensor(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`act` for tensors, which gives one result for one tensor under several names.

    Ranks then give tied tensors the same names, as `checkpoint.state.pack` does.
    """
    made: dict[object, Any] = {}

    def once(tensor: Any) -> Any:
        key: object = id(tensor)
        if isinstance(tensor, Tensor) and tensor.numel() and not is_sharded(tensor):
            key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        return made.setdefault(key, act(tensor))

    return once


def _address(rank: int) -> Address:
    return Address("state", rank, 0, 0)


def _copy(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.clone()
