"""This rank's part of the whole model's state: gathered for a checkpoint, and taken out of one."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from evenstep.checkpoint import Shard, is_sharded, outline
from evenstep.errors import ArgumentError
from evenstep.parallel import mapped
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.wire import Address, Wire
from evenstep.tensors import named_buffers, named_parameters, state_of
from evenstep.train.layer_keys import in_order
from evenstep.train.state import Tree

T = TypeVar("T")


class PipelineStateSharding:
    """The whole model: nothing has to be gathered."""

    def gathered(self, state: Tree) -> Tree:
        """The whole state, on the first rank at least; all ranks call it together."""
        return state

    def part(self, state: Tree) -> Tree:
        return state

    def own(self, state: Tree) -> Tree:
        return state


class StageStateSharding(PipelineStateSharding):
    """The stages of one rank.

    Args:
        wire: over which states are sent.
    """

    def __init__(self, model: PipelineModel, wire: Wire) -> None:
        self._model = model
        self._wire = wire
        self.pipeline = model.mesh.pipeline
        self.aliases = model.aliases

    def gathered(self, state: Tree) -> Tree:
        """The whole state on the first rank of the first pipeline; elsewhere this rank's own.

        Where tensors are cut over ranks, each rank gives its own, and `Shard`s that hold nothing of what others have.
        """
        mine = self._parts(state)
        if any(self.pipeline.gather(_is_cut(mine))):
            return {**state, **self._merged(self._with_others(mine))}
        if self._model.mesh.data.rank:
            return state
        if self.pipeline.rank:
            self._wire.send(_address(self.pipeline.rank), mine, 0)
            self._wire.flush()
            return state
        others = [self._wire.receive(_address(rank), rank) for rank in range(1, self.pipeline.ranks)]
        return {**state, **self._merged([mine, *others])}

    def part(self, state: Tree) -> Tree:
        merged = self._merged([self._parts(state)])
        return {**state, **merged}

    def own(self, state: Tree) -> Tree:
        aliases = self.aliases
        mine = state_of(self._model)
        known = {name for names in self.pipeline.gather(set(mine)) for name in names}
        trained = list(named_parameters(self._model))
        averaged = [*trained, *named_buffers(self._model)]
        saved = state["optimizer"]
        if saved is not None:
            groups: list[Tree] = []
            for group in saved["groups"]:
                here = set(group["parameters"])
                groups.append({**group, "parameters": [n for n in trained if aliases.get(n, n) in here]})
            of_parameters = _under(trained, saved["state"], aliases)
            states = {name: _copied(value) for name, value in of_parameters.items()}
            saved = {**saved, "state": states, "groups": groups}
        return {
            **state,
            "model": {name: value for name, value in state["model"].items() if name in mine or name not in known},
            "optimizer": saved,
            "ema": _under(averaged, state["ema"], aliases),
            "trained": _under(trained, state.get("trained", {}), aliases),
        }

    def _parts(self, state: Tree) -> Tree:
        return {part: state[part] for part in ("model", "optimizer", "ema", "trained")}

    def _with_others(self, mine: Tree) -> list[Tree]:
        parts = self.pipeline.gather(_outlined(mine, {}))
        parts[self.pipeline.rank] = mine
        return parts

    def _merged(self, states: list[Tree]) -> Tree:
        counts = [len(state["optimizer"]["groups"]) for state in states]
        if len(set(counts)) > 1:
            raise ArgumentError(
                f"the optimizers of all pipeline ranks must have the same number of parameter groups, but have "
                f"{counts}; a rank without a parameter of some group must give that group empty."
            )
        first = states[0]["optimizer"]
        groups: list[Tree] = []
        for number, group in enumerate(first["groups"]):
            names = (n for state in states for n in state["optimizer"]["groups"][number]["parameters"])
            groups.append({**group, "parameters": self._ordered(names)})
        states_of = _union(state["optimizer"]["state"] for state in states)
        averages = _union(state["ema"] for state in states)
        values = _union(state["model"] for state in states)
        return {
            "model": {name: values[name] for name in self._ordered(values, aliases=True)},
            "optimizer": {**first, "state": {n: states_of[n] for n in self._ordered(states_of)}, "groups": groups},
            "ema": {name: averages[name] for name in self._ordered(averages)},
            "trained": _union(state["trained"] for state in states),
        }

    def _ordered(self, names: Iterable[str], *, aliases: bool = False) -> list[str]:
        left_out = () if aliases else self.aliases
        return in_order(self._model, [name for name in names if name not in left_out])


def _is_cut(tree: object) -> bool:
    if isinstance(tree, dict):
        return any(_is_cut(value) for value in cast("Tree", tree).values())
    if type(tree) in (list, tuple):
        return any(_is_cut(value) for value in cast("list[object]", tree))
    return is_sharded(tree)


def _outlined(tree: Any, made: dict[object, Shard]) -> Any:
    if isinstance(tree, dict):
        return {key: _outlined(value, made) for key, value in cast("Tree", tree).items()}
    if type(tree) in (list, tuple):
        return type(tree)(_outlined(value, made) for value in tree)
    if not isinstance(tree, Tensor | Shard):
        return tree
    # one tensor under two names must get one name on all ranks: as `checkpoint.state` tells
    key: object = id(tree)
    if isinstance(tree, Tensor) and tree.numel() and not is_sharded(tree):
        key = tree.data_ptr(), tree.dtype, tree.shape, tree.stride()
    return made.setdefault(key, outline(tree))


def build_pipeline_state_sharding(model: nn.Module, wire: Wire | None) -> PipelineStateSharding:
    if isinstance(model, PipelineModel) and wire is not None:
        return StageStateSharding(model, wire)
    return PipelineStateSharding()


def _address(rank: int) -> Address:
    return Address("state", rank, 0, 0)


def _under(names: Iterable[str], values: Mapping[str, T], aliases: Mapping[str, str]) -> dict[str, T]:
    return {name: values[aliases.get(name, name)] for name in names if aliases.get(name, name) in values}


def _union(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}


def _copied(state: Mapping[str, Any]) -> Tree:
    return mapped(dict(state), lambda tensor: tensor if tensor.is_meta else tensor.clone())
