"""State of an engine as a dict of parts: gathered for a checkpoint, compared with a saved state, and restored."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from evenstep.arguments import first_of, format_name
from evenstep.checkpoint import ALONE, RankGroup, Shard, on_all_ranks
from evenstep.errors import CheckpointError
from evenstep.internals import buffers_of, is_saved, unwrapped
from evenstep.optim.optimizers import moded
from evenstep.parallel import ShardedTensorRef, mapped
from evenstep.pipeline import PipelineModel
from evenstep.tensors import load_state, named_parameters, plain, state_of
from evenstep.train.ledger import Ledger
from evenstep.train.progress import Progress
from evenstep.train.state import Tree
from evenstep.train.state.optimizer_state import (
    changed_options,
    check_optimizer,
    load_optimizer,
    optimizer_state,
    options_of,
    parameter_names,
)
from evenstep.train.state.pipeline_state import gathered, own_stages
from evenstep.train.state.settings import changed_settings
from evenstep.train.tasks.tasks import check_task_states, states_of

if TYPE_CHECKING:
    from evenstep.train.build import Parts

Take: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Gives the part of a whole tensor (second) that a live tensor (first) holds."""

_MASTER = "master"  # beside the optimizer state of a parameter, on the way to the ranks that save


@final
class EngineState:
    """State of an engine.

    Attributes:
        begun: updates at which parts of the run were reset.
    """

    def __init__(self, parts: "Parts", ledger: Ledger) -> None:
        self.begun: Tree = {}
        self._parts = parts
        self._ledger = ledger
        self._model = unwrapped(parts.model)
        self._own = parameter_names(self._model, parts.optimizer)  # of those that this rank steps
        self._built = options_of(parts.optimizer)
        self._flags = {plain(name): (module, module.training) for name, module in self._model.named_modules()}

    @property
    def identity(self) -> Tree:
        """Values that a resumed run must have in common with the saved one."""
        return {"seed": self._parts.seed, "precision": self._parts.precision.name}

    def state_dict(self, *, whole: bool) -> Tree:
        """The state of all ranks, which call it together.

        Args:
            whole: False keeps tensors that are cut over ranks as they are, which costs no memory.
        """
        parts, core = self._parts, self._parts.core
        core.require_whole()
        core.trained.check_groups()
        layout = parts.execution.reducers.layout
        taken: Callable[[Any], Tree] = partial(mapped, act=layout.full if whole else _as_shard)
        optimizer = optimizer_state(parts.optimizer, self._own, self._built)
        for group, names in zip(optimizer["groups"], core.trained.names, strict=True):
            group["parameters"] = list(names)
        own = {name: {_MASTER: one.detach()} for name, one in parts.stepper.masters.items()}
        mine = {name: {**optimizer["state"].get(name, {}), **own.get(name, {})} for name in optimizer["state"] | own}
        everybody = layout.optimizer_state(mine)
        model = taken(state_of(self._model))
        in_order = (name for names in core.trained.names for name in names)
        states = {name: taken(everybody[name]) for name in in_order if name in everybody}
        masters = {name: one.pop(_MASTER) for name, one in states.items() if _MASTER in one}
        tree = {
            "model": {**model, **_under_all_names(self._model, masters)},
            "optimizer": {**optimizer, "state": {name: one for name, one in states.items() if one}},
            "ema": taken(self._averages()),
            "precision": parts.context.loss_scale.state_dict(),
            "trained": core.trained.state_dict(),
            "training": {
                name: {"now": module.training, "built": built}
                for name, (module, built) in self._flags.items()
                if module.training != built
            },
        }
        edges = parts.execution.runner.edges
        if edges is not None:
            tree = gathered(cast("PipelineModel", self._model), edges.wire, tree)
        run: Tree = {**self.identity, "settings": parts.settings, "begun": self.begun}
        trained_by = [type(one).__name__ for one in moded(parts.optimizer)]
        if trained_by:  # optimizers that evaluate other parameters than those they train, which a state holds
            run["trained_by"] = ", ".join(trained_by)
        return {
            **tree,
            "progress": self._ledger.progress.state_dict(),
            "tasks": states_of(parts.context.tasks),
            "lr_schedule": core.learning_rates.state_dict(),
            "run": run,
        }

    def _averages(self) -> dict[str, Tensor]:
        return {} if self._parts.average is None else self._parts.average.state_dict()

    def changed_settings(self, state: Tree) -> dict[str, str]:
        """Messages about settings of updates that differ from a state of `own_part`, by name."""
        parts = self._parts
        changed = changed_settings(state["run"].get("settings", {}), parts.settings)
        options = changed_options(state["optimizer"], self._built) if "optimizer" in state else []
        texts = {"optimizer": "; ".join(options), "frozen": parts.core.trained.changed(state.get("trained", {}))}
        return {name: text for name, text in (texts | changed).items() if text}

    def own_part(self, state: Tree, *, take: Take | None = None, ranks: RankGroup = ALONE) -> Tree:
        """This rank's part of a whole state, compared with the live one; changes nothing.

        Args:
            state: without a part that is reset.
            take: `ParameterLayout.like` by default; or a reader's.
            ranks: all of which raise if one does.
        """
        own = own_stages(self._model, state) if isinstance(self._model, PipelineModel) else state

        def compared() -> Tree:
            self._check(own)
            check_task_states(own.get("tasks", {}), self._parts.context.tasks)
            return self._taken(own, take or self._parts.execution.reducers.layout.like)

        return on_all_ranks(ranks, compared)

    def _check(self, state: Tree) -> None:
        masters = _under_all_names(self._model, dict.fromkeys(self._parts.stepper.rounded, torch.float32))
        late = _late_buffers(self._model, state["model"])
        live = {name: one for name, one in state_of(self._model).items() if name not in late}
        saved = {name: one for name, one in state["model"].items() if name not in late}
        _check_fits(saved, live, "model", formats=masters)
        if "optimizer" in state:
            check_optimizer(state["optimizer"], self._parts.optimizer, self._parts.core.trained.names)
        if self._parts.average is not None and state["ema"]:
            _check_fits(state["ema"], self._averages(), "average")

    def _taken(self, state: Tree, take: Take) -> Tree:
        def each_taken(live: Mapping[str, Tensor], whole: Mapping[str, Any]) -> Tree:
            return {
                name: take(live.get(name, value), value) if isinstance(value, Tensor) else value
                for name, value in whole.items()
            }

        live, average = state_of(self._model), self._averages()
        taken = {**state, "model": each_taken(live, state["model"])}
        if average:
            taken["ema"] = each_taken(average, state["ema"])
        if "optimizer" in state:
            saved: Tree = state["optimizer"]["state"]
            stepped = [name for group in self._own for name in group if name in saved]
            states = {name: mapped(saved[name], partial(take, live[name])) for name in stepped}
            taken["optimizer"] = {**state["optimizer"], "state": states}
        return taken

    def load(self, state: Tree) -> list[str]:
        """Restore a state of `own_part`; returns messages about reset or dropped parts."""
        parts, core = self._parts, self._parts.core
        changed = [*self.changed_settings(state).values()]
        core.is_whole = False  # until all of it is loaded
        self._ledger.progress = Progress.from_state_dict(state["progress"])
        for name, theirs in state.get("tasks", {}).items():
            task = parts.context.tasks.get(name)
            if task is not None and (theirs or task.state_dict()):
                task.load_state_dict(theirs)
        _make_late_buffers(self._model, state["model"])
        load_state(self._model, state["model"])
        parts.stepper.load_masters(state["model"])
        if "optimizer" in state:
            load_optimizer(state["optimizer"], parts.optimizer, self._own, self._built)
        parts.context.loss_scale.load_state_dict(state["precision"])
        core.trained.load_state_dict(state["trained"])
        for name, (module, built) in self._flags.items():  # a module that was built otherwise keeps its own flag
            saved = state["training"].get(name)
            module.training = saved["now"] if saved is not None and saved["built"] == built else built
        changed += self._load_average(state["ema"])
        self.begun = state["run"].get("begun") or {}
        core.learning_rates.load_state_dict(state.get("lr_schedule", {}), self.begun.get("lr_schedule", 0))
        core.is_whole = True
        return changed

    def _load_average(self, saved: Tree) -> list[str]:
        average = self._parts.average
        if average is None:
            return ["the average of the parameters is dropped"] if saved else []
        if saved:
            average.load_state_dict(saved)
            return []
        average.restart()
        return ["the average of the parameters is new and begins as a copy of them"]


def _under_all_names(model: nn.Module, values: Mapping[str, Any]) -> Tree:
    if not values:
        return {}
    first = {id(parameter): name for name, parameter in named_parameters(model).items()}
    every = ((plain(name), first[id(one)]) for name, one in model.named_parameters(remove_duplicate=False))
    return {name: values[known] for name, known in every if known in values}


def _late_buffers(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, tuple[nn.Module, str]]:
    """Buffers that forwards of the saved run have made or resized, by name: module and key."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules():
        for key, buffer in buffers_of(module).items():
            name = plain(f"{prefix}.{key}" if prefix else key)
            value = saved.get(name)
            if not isinstance(value, Tensor) or not is_saved(module, key):
                continue
            if buffer is None or (buffer.shape != value.shape and buffer.dtype == value.dtype):
                found[name] = module, key
    return found


def _make_late_buffers(model: nn.Module, saved: Mapping[str, Any]) -> None:
    for name, (module, key) in _late_buffers(model, saved).items():
        buffer = buffers_of(module)[key]
        if buffer is None:
            there = next(model.parameters(), torch.empty(0)).device
            buffers_of(module)[key] = torch.empty_like(saved[name], device=there)
        else:
            buffer.resize_(saved[name].shape)


def _as_shard(tensor: Tensor | ShardedTensorRef) -> Tensor | Shard:
    if isinstance(tensor, Tensor):
        return tensor
    # each rank that holds an empty tensor holds all of it
    local = tensor.local.new_empty(tensor.shape) if 0 in tensor.shape else tensor.local
    return Shard(local=local, shape=tensor.shape, offsets=(0,) * len(tensor.shape))


def _check_fits(
    saved: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    what: str,
    *,
    formats: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    def described(tensor: Tensor | None, dtype: torch.dtype | None = None) -> str:
        return "missing" if tensor is None else f"{format_name(dtype or tensor.dtype)} {list(tensor.shape)}"

    faults: list[str] = []
    for name in {**live, **saved}:
        found, wanted = described(saved.get(name)), described(live.get(name), formats.get(name))
        if found != wanted:
            faults.append(f"{name} is {found} instead of {wanted}")
    if faults:
        raise CheckpointError(
            f"the checkpoint's {what} does not fit this one: {first_of(faults, 5, '; ')}. Build the model of the "
            f"checkpoint."
        )
