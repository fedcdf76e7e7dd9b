"""What ranks that step alone hold beside what they share, in a state and back.

The part "model" of a state is what the ranks share, so whoever reads it gets the model that is evaluated. The part
"local" has the rest: the outer optimizer's momentum, means on their way, and of each rank its own parameters, if it has
stepped since the last share, its optimizer's state and its loss scale. Where ranks always step together there is no
such part.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.errors import CheckpointError
from evenstep.names import named_parameters, parameters_in
from evenstep.optim.ema import Ema
from evenstep.optim.multi import inner
from evenstep.optim.stepping import Steps
from evenstep.parallel import Reducers, mapped
from evenstep.parallel.layout import OwnStates
from evenstep.parallel.shares import Shares
from evenstep.train.state import Tree
from evenstep.train.state.afresh import how_to_reset
from evenstep.train.state.pipeline_state import PipelineStateSharding


class LocalState:
    """Ranks that always step together: there is nothing beside what they share.

    Attributes:
        of_others: what a loaded state had of ranks that come and go, by number, for those that have not read it.
    """

    def __init__(self) -> None:
        self.of_others: dict[str, Tree] = {}

    def told(self, state: Tree, taken: Callable[[Mapping[str, Any]], Tree] | None) -> Tree:
        """`state`, as it is saved.

        Args:
            taken: gives tensors that one rank holds as they are saved; all ranks call this together. None: this rank
                alone asks, and the others' are left out.
        """
        return state

    def check(self, state: Tree) -> None:
        """Raise CheckpointError unless `state` fits."""
        if state.get("local"):
            ranks = state["local"]["ranks"]
            raise CheckpointError(
                f"the checkpoint is of {ranks} ranks that step alone, each with parameters and an optimizer state of "
                f"its own, which this run can't go on with; resume with the strategy `local` on {ranks} ranks, or "
                f"begin at what those ranks share: {how_to_reset('optimizer')}."
            )

    def own_part(self, state: Tree, take: Callable[[Tensor, Tensor], Tensor]) -> Tree:
        """What of a state this rank holds; see `TrainState.own_part`."""
        return state

    def load(self, state: Tree) -> list[str]:
        """Restore what `own_part` gave, after the model and optimizer; says what began afresh."""
        return []

    def followed(self) -> Mapping[str, Tensor]:
        """What ranks share, parameters and buffers by name, while each makes something else of it; else nothing."""
        return {}


@final
class AloneState(LocalState):
    """Ranks that step alone."""

    def __init__(self, reducer: Shares, layout: OwnStates, optimizer: "InnerOptimizer") -> None:
        super().__init__()
        self._reducer, self._layout, self._optimizer = reducer, layout, optimizer

    def told(self, state: Tree, taken: Callable[[Mapping[str, Any]], Tree] | None) -> Tree:
        reducer = self._reducer
        if not reducer.is_alone:
            return state
        optimizer = {**state["optimizer"], "state": {}}
        beside = optimizer.pop("beside", {})
        mine = {
            "model": reducer.own,
            "optimizer": state["optimizer"]["state"],
            "beside": beside,
            "precision": state["precision"],
        }
        own = {str(self._layout.group.rank): mine} if taken is None else taken(self._layout.of_all(mine))
        model, shared = state["model"], reducer.shared
        formats = {name: shared[name].to(one.dtype) for name, one in model.items() if name in shared}
        wider = {name: one for name, one in shared.items() if name in formats and formats[name].dtype != one.dtype}
        return {
            **state,
            "model": {**model, **formats},
            "optimizer": optimizer,
            "precision": own.get("0", mine)["precision"],  # for a run that goes on without the ranks' own
            "local": {
                "ranks": self._layout.group.ranks,
                "shared": wider,
                "momentum": reducer.momentum,
                "means": reducer.means(waits=taken is not None),
                "own": own,
            },
        }

    def check(self, state: Tree) -> None:
        saved, reducer = state.get("local"), self._reducer
        if not saved:
            return
        ranks = self._layout.group.ranks
        if saved["ranks"] != ranks and not self._layout.group.can_change:
            raise CheckpointError(
                f"the checkpoint is of {saved['ranks']} ranks that step alone, each with parameters and an optimizer "
                f"state of its own, but this run has {ranks}; resume on {saved['ranks']}, or begin at what those "
                f"ranks share: {how_to_reset('optimizer')}."
            )
        update = state["progress"]["update"]
        if update < reducer.together_until:
            raise CheckpointError(
                f"the checkpoint is of ranks that step alone after update {update}, each with parameters and an "
                f"optimizer state of its own, from which they can't go on together; let `synchronous_updates` be at "
                f"most {update}, or begin at what they share: {how_to_reset('optimizer')}."
            )
        known = {number: set(names) for number, names in enumerate(reducer.fragments)}
        if any(known.get(int(number)) != set(one["mean"]) for number, one in saved["means"].items()):
            raise CheckpointError(
                "means of the ranks' parameters were on their way when the checkpoint was saved, of other fragments "
                "than this run has; resume with as many `fragments` as it was saved with."
            )

    def own_part(self, state: Tree, take: Callable[[Tensor, Tensor], Tensor]) -> Tree:
        saved = state.get("local")
        if not saved:
            return state
        group = self._layout.group
        others = {rank: theirs for rank, theirs in saved["own"].items() if rank != str(group.rank)}
        mine = saved["own"].get(str(group.rank), NEW)  # only ranks that come and go may be more than were saved
        model = {name: take(_ANY, value) for name, value in mine["model"].items()}
        beside = {"beside": mapped(mine["beside"], partial(take, _ANY))} if mine["beside"] else {}
        optimizer = {**state["optimizer"], "state": mine["optimizer"], **beside}
        precision = mine.get("precision", state["precision"])  # a rank that comes has none of its own
        own = {"own": model, "is_new": not any(mine.values()), "others": others if group.can_change else {}}
        return {**state, "optimizer": optimizer, "precision": precision, "local": {**saved, **own}}

    def load(self, state: Tree) -> list[str]:
        reducer, saved = self._reducer, state.get("local")
        reducer.restart()
        self.of_others = saved["others"] if saved else {}
        if not saved:
            return []
        if saved["is_new"]:
            self._optimizer.begin()
        momentum = saved["momentum"] if reducer.momentum else {}
        reducer.load(shared=saved["shared"], own=saved["own"], momentum=momentum, means=saved["means"])
        if saved["momentum"] and not momentum:
            return ["the momentum of the outer optimizer is given up"]
        return ["the momentum of the outer optimizer begins afresh"] if reducer.momentum and not momentum else []

    def followed(self) -> Mapping[str, Tensor]:
        return self._reducer.shared if self._reducer.is_alone else {}


NEW: Tree = {"model": {}, "optimizer": {}, "beside": {}}
"""Of a rank that begins with what the others share, and with a new optimizer's state."""
_ANY = torch.empty(0)


@final
@dataclass(slots=True)
class InnerOptimizer:
    """What a rank steps alone with; see `parallel.shares.Inner`.

    Args:
        optimizer: as it was built.
        steps: in which format it steps.
        ema: the average that follows what ranks share, or None.
    """

    optimizer: Optimizer
    steps: Steps
    ema: Ema | None
    _built: dict[int, Tree] = field(init=False)

    def __post_init__(self) -> None:
        self._built = {id(one): deepcopy(state) for each in inner(self.optimizer) for one, state in each.state.items()}

    @property
    def masters(self) -> Mapping[str, Tensor]:
        return self.steps.masters

    def rates(self, parameters: Sequence[nn.Parameter]) -> list[float]:
        groups = [group for each in inner(self.optimizer) for group in each.param_groups]
        with_rate = [group for group in groups if group.get("lr") is not None]
        by_id = {id(one): float(group["lr"]) for group in with_rate for one in group["params"]}
        return [by_id.get(id(one), 1.0) for one in parameters]

    def begin(self) -> None:
        """Let all state be that of a new optimizer."""
        self.reset([one for each in inner(self.optimizer) for one in parameters_in(each)])

    def reset(self, parameters: Sequence[nn.Parameter]) -> None:
        for each in inner(self.optimizer):
            held = {id(one) for one in parameters_in(each)}
            for one in parameters:
                each.state.pop(one, None)
                if id(one) in self._built.keys() & held:
                    each.state[one] = deepcopy(self._built[id(one)])

    def follow_shared(self, update: int) -> None:
        if self.ema is not None:
            self.ema.after_update(update)


def build_local_state(
    model: nn.Module,
    reducers: Reducers,
    optimizer: Optimizer,
    steps: Steps,
    ema: Ema | None,
    sharding: PipelineStateSharding,
) -> LocalState:
    """What ranks hold beside what they share; one that steps alone does so with this optimizer."""
    reducer, layout = reducers.alone, reducers.layout
    if reducer is None or not isinstance(layout, OwnStates):
        return LocalState()
    held = {id(one) for one in parameters_in(optimizer)}
    parameters = {name: one for name, one in named_parameters(model).items() if id(one) in held}
    sizes = sharding.sizes({name: one.numel() for name, one in parameters.items()})
    own = InnerOptimizer(optimizer, steps, ema)
    reducer.attach(model, parameters, own, pipeline=sharding.pipeline, aliases=sharding.aliases, sizes=sizes)
    return AloneState(reducer, layout, own)
