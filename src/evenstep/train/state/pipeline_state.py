"""State of the stages on pipeline ranks: gathered for a checkpoint, and taken out of a whole state."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor

from evenstep.checkpoint import Shard, is_sharded, outline
from evenstep.parallel import mapped
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.wire import Address, Wire
from evenstep.tensors import named_buffers, named_parameters, state_of
from evenstep.train.randomness import in_order
from evenstep.train.state import Tree

T = TypeVar("T")


class StageState:
    """State of the stages of one pipeline rank; `wire` sends it to the first."""

    def __init__(self, model: PipelineModel, wire: Wire) -> None:
        self._model = model
        self._wire = wire
        self._pipeline = model.mesh.pipeline
        self._aliases = model.aliases

    def gathered(self, state: Tree) -> Tree:
        """The whole state on the first rank of the first pipeline; this rank's own on the others.

        Where tensors are cut over ranks, each rank gives its own, and an empty `Shard` for each tensor of another.
        """
        leaves: list[object] = []
        _each_leaf(state, leaves.append)
        if any(self._pipeline.gather(any(map(is_sharded, leaves)))):
            states = self._pipeline.gather(_each_leaf(state, once_per_tensor(outline)))
            states[self._pipeline.rank] = state
            return self._merged(states)
        if self._model.mesh.data.rank:
            return state
        if self._pipeline.rank:
            self._wire.send(_address(self._pipeline.rank), state, 0)
            self._wire.flush()
            return state
        others = [self._wire.receive(_address(rank), rank) for rank in range(1, self._pipeline.ranks)]
        return self._merged([state, *others])

    def own(self, state: Tree) -> Tree:
        """This rank's part of a whole state."""
        mine = state_of(self._model)
        known = {name for names in self._pipeline.gather(set(mine)) for name in names}
        trained = list(named_parameters(self._model))
        averaged = [*trained, *named_buffers(self._model)]
        own = {
            **state,
            "model": {name: value for name, value in state["model"].items() if name in mine or name not in known},
            "ema": self._under(averaged, state["ema"]),
            "trained": self._under(trained, state["trained"]),
        }
        if "optimizer" in state:
            saved: Tree = state["optimizer"]
            groups = [
                {**group, "parameters": [n for n in trained if self._aliases.get(n, n) in set(group["parameters"])]}
                for group in saved["groups"]
            ]
            # copies of a tied parameter must not share memory
            states = {name: mapped(one, _copy) for name, one in self._under(trained, saved["state"]).items()}
            own["optimizer"] = {**saved, "state": states, "groups": groups}
        return own

    def _under(self, names: Iterable[str], values: Mapping[str, T]) -> dict[str, T]:
        stored = {name: self._aliases.get(name, name) for name in names}
        return {name: values[one] for name, one in stored.items() if one in values}

    def _merged(self, states: list[Tree]) -> Tree:
        first = states[0]["optimizer"]
        groups: list[Tree] = []
        for same in zip(*(state["optimizer"]["groups"] for state in states), strict=True):
            names = (name for group in same for name in group["parameters"])
            groups.append({**same[0], "parameters": self._ordered(names)})
        states_of = _union(state["optimizer"]["state"] for state in states)
        averages = _union(state["ema"] for state in states)
        values = _union(state["model"] for state in states)
        return {
            **states[0],
            "model": {name: values[name] for name in in_order(self._model, values)},
            "optimizer": {**first, "state": {n: states_of[n] for n in self._ordered(states_of)}, "groups": groups},
            "ema": {name: averages[name] for name in self._ordered(averages)},
            "trained": _union(state["trained"] for state in states),
            "training": _union(state["training"] for state in states),
        }

    def _ordered(self, names: Iterable[str]) -> list[str]:
        return in_order(self._model, [name for name in names if name not in self._aliases])


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


def _each_leaf(tree: Any, act: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _each_leaf(value, act) for key, value in cast("Tree", tree).items()}
    if type(tree) in (list, tuple):
        return type(tree)(_each_leaf(value, act) for value in tree)
    return act(tree) if isinstance(tree, Tensor | Shard) else tree


def _address(rank: int) -> Address:
    return Address("state", rank, 0, 0)


def _union(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.clone()
