"""Tensors and flags of a run by name: gathered for a checkpoint, compared with a saved state, and restored.

The parts "model" (with masters where parameters have them), "optimizer", "ema", "precision", "trained", "training"; an
engine adds counters, states of tasks, the LR schedule, and a description of the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import first_of, format_name
from evenstep.checkpoint import ALONE, RankGroup, Shard, on_all_ranks
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.internals import buffers_of, is_saved, unwrapped
from evenstep.optim.ema import Average, Ema
from evenstep.optim.optimizers import moded
from evenstep.optim.stepper import Stepper
from evenstep.parallel import ParameterLayout, ShardedTensorRef, mapped
from evenstep.pipeline.pipeline_model import in_stages
from evenstep.precision import LossScale
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
)
from evenstep.train.state.pipeline_state import StageState
from evenstep.train.state.settings import changed_settings
from evenstep.train.tasks.tasks import check_task_states, states_of
from evenstep.train.trained import TrainedParameters
from evenstep.train.update.context import TrainContext

Take: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Gives the part of a whole tensor (second) that a live tensor (first) holds."""

_MASTER = "master"  # beside the optimizer state of a parameter, on the way to the ranks that save


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Parameter names of each group."""
    names = {id(parameter): name for name, parameter in named_parameters(unwrapped(model)).items()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ArgumentError(
                    f"group {number} of the optimizer has a parameter of shape {list(parameter.shape)} that is not the "
                    f"model's; build the optimizer from this model's `parameters()`, after all that replaces them.",
                    field="optimizer",
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def is_shared(model: nn.Module, layout: ParameterLayout) -> bool:
    return layout.divides != "nothing" or in_stages(model)


@final
class ModuleFlags:
    """`training` flags of modules that differ from those at the run's beginning, by module name."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {plain(name): module for name, module in model.named_modules()}
        self._built: dict[str, bool] = {}
        self._loaded: Tree = {}

    def begin(self) -> None:
        """The first time, take the flags for those at the run's beginning, and set loaded flags."""
        if not self._built:
            self._built = {name: module.training for name, module in self._modules.items()}
            self._set_loaded()

    def state_dict(self) -> Tree:
        if not self._built:
            return self._loaded
        now = {name: module.training for name, module in self._modules.items()}
        return {name: {"now": now[name], "built": was} for name, was in self._built.items() if now[name] != was}

    def load_state_dict(self, state: Tree) -> None:
        """Set the flags of a saved run; a module that begins otherwise in this run keeps its own."""
        self._loaded = state
        self._set_loaded()

    def _set_loaded(self) -> None:
        for name, built in self._built.items():
            saved = self._loaded.get(name)
            self._modules[name].training = saved["now"] if saved is not None and saved["built"] == built else built


@final
@dataclass(slots=True, kw_only=True)
class TrainState:
    """Tensors and flags of a run on this rank.

    Args:
        model: unwrapped.
        optimizer: of its parameters, or of those that this rank steps.
        names: parameter names of each group, over all ranks.
        averaged_as: formats of the average of parameters that have another format, by name.
        stages: of a model in stages.
    """

    model: nn.Module
    optimizer: Optimizer
    names: list[list[str]]
    layout: ParameterLayout
    ema: Ema | None
    loss_scale: LossScale
    trained: TrainedParameters
    stepper: Stepper
    averaged_as: Mapping[str, torch.dtype] = field(default_factory=dict)
    stages: StageState | None = None
    average: Average | None = field(init=False)
    flags: ModuleFlags = field(init=False)
    _own: list[list[str]] = field(init=False)
    _built: list[Tree] = field(init=False)

    def __post_init__(self) -> None:
        self._own = parameter_names(self.model, self.optimizer)
        self._built = options_of(self.optimizer)
        self.average = None if self.ema is None else Average(self.ema, self.model, self.averaged_as)
        self.flags = ModuleFlags(self.model)

    def state_dict(self, *, whole: bool = True) -> Tree:
        """The parts of all ranks, which call it together.

        Args:
            whole: False keeps tensors that are cut over ranks as they are, which costs no memory.
        """
        self.trained.check_groups()
        taken: Callable[[Any], Tree] = partial(mapped, act=self.layout.full if whole else _as_shard)
        state = optimizer_state(self.optimizer, self._own, self._built)
        for group, names in zip(state["groups"], self.names, strict=True):
            group["parameters"] = list(names)
        own = {name: {_MASTER: one.detach()} for name, one in self.stepper.masters.items()}
        mine = {name: {**state["state"].get(name, {}), **own.get(name, {})} for name in {**state["state"], **own}}
        everybody = self.layout.optimizer_state(mine)
        model = taken(state_of(self.model))
        states = {name: taken(everybody[name]) for names in self.names for name in names if name in everybody}
        masters = {name: one.pop(_MASTER) for name, one in states.items() if _MASTER in one}
        tree = {
            "model": {**model, **_under_all_names(self.model, masters)},
            "optimizer": {**state, "state": {name: one for name, one in states.items() if one}},
            "ema": {} if self.average is None else taken(self.average.state_dict()),
            "precision": self.loss_scale.state_dict(),
            "trained": self.trained.state_dict(),
            "training": self.flags.state_dict(),
        }
        return tree if self.stages is None else self.stages.gathered(tree)

    def changed_options(self, state: Tree) -> list[str]:
        return changed_options(state["optimizer"], self._built) if "optimizer" in state else []

    def own_part(self, state: Tree, *, take: Take | None = None, ranks: RankGroup = ALONE) -> Tree:
        """This rank's part of a whole state, compared with the live one; changes nothing.

        Args:
            state: without a part that is reset.
            take: `ParameterLayout.like` by default; or a reader's.
            ranks: all of which raise if one does.
        """
        own = state if self.stages is None else self.stages.own(state)
        return on_all_ranks(ranks, lambda: self._taken(self._checked(own), take or self.layout.like))

    def _checked(self, state: Tree) -> Tree:
        masters = _under_all_names(self.model, dict.fromkeys(self.stepper.rounded, torch.float32))
        late = _late_buffers(self.model, state["model"])
        live = {name: one for name, one in state_of(self.model).items() if name not in late}
        saved = {name: one for name, one in state["model"].items() if name not in late}
        _check_fits(saved, live, "model", formats=masters)
        if "optimizer" in state:
            check_optimizer(state["optimizer"], self.optimizer, self.names)
        if self.average is not None and state["ema"]:
            _check_fits(state["ema"], self.average.state_dict(), "average")
        return state

    def _taken(self, state: Tree, take: Take) -> Tree:
        live = state_of(self.model)
        average = {} if self.average is None else self.average.state_dict()
        taken = {
            **state,
            "model": _each_taken(live, state["model"], take),
            "ema": _each_taken(average, state["ema"], take) if average else state["ema"],
        }
        if "optimizer" in state:
            saved: Tree = state["optimizer"]["state"]
            stepped = [name for group in self._own for name in group if name in saved]
            states = {name: mapped(saved[name], partial(take, live[name])) for name in stepped}
            taken["optimizer"] = {**state["optimizer"], "state": states}
        return taken

    def load_state_dict(self, state: Tree) -> list[str]:
        """Restore a state of `own_part`; gives texts on an average that is new or dropped."""
        for name, (module, key) in _late_buffers(self.model, state["model"]).items():
            buffer = buffers_of(module)[key]
            if buffer is None:
                there = next(self.model.parameters(), torch.empty(0)).device
                buffers_of(module)[key] = torch.empty_like(state["model"][name], device=there)
            else:
                buffer.resize_(state["model"][name].shape)
        load_state(self.model, state["model"])
        self.stepper.load_masters(state["model"])
        if "optimizer" in state:
            load_optimizer(state["optimizer"], self.optimizer, self._own, self._built)
        self.loss_scale.load_state_dict(state["precision"])
        self.trained.load_state_dict(state["trained"])
        self.flags.load_state_dict(state["training"])
        if self.average is None:
            return ["the average of the parameters is dropped"] if state["ema"] else []
        if state["ema"]:
            self.average.load_state_dict(state["ema"])
            return []
        self.average.restart()
        return ["the average of the parameters is new and begins as a copy of them"]


@final
@dataclass(slots=True, kw_only=True)
class EngineState:
    """State of an engine.

    Args:
        settings: of updates, as plain values.
        begun: updates at which parts of the run were reset.
    """

    saved: TrainState
    ledger: Ledger
    context: TrainContext
    settings: Tree
    begun: Tree = field(default_factory=Tree)

    @property
    def identity(self) -> Tree:
        """Values that a resumed run must have in common with the saved one."""
        return {"seed": self.context.seed, "precision": self.context.precision.name}

    def state_dict(self, *, whole: bool) -> Tree:
        """The state of all ranks, which call it together; see `TrainState.state_dict`."""
        self.ledger.core.require_whole()
        run: Tree = {**self.identity, "settings": self.settings, "begun": self.begun}
        trained_by = [type(one).__name__ for one in moded(self.saved.optimizer)]
        if trained_by:  # optimizers that evaluate other parameters than those they train, which a state holds
            run["trained_by"] = ", ".join(trained_by)
        return {
            **self.saved.state_dict(whole=whole),
            "progress": self.ledger.progress.state_dict(),
            "tasks": states_of(self.context.tasks),
            "lr_schedule": self.ledger.core.learning_rates.state_dict(),
            "run": run,
        }

    def changed_settings(self, state: Tree) -> dict[str, str]:
        """Messages about settings of updates that differ from a state of `own_part`, by name."""
        told = changed_settings(state["run"].get("settings", {}), self.settings)
        options = "; ".join(self.saved.changed_options(state))
        frozen = self.saved.trained.changed(state.get("trained", {}))
        return {name: said for name, said in {"optimizer": options, "frozen": frozen, **told}.items() if said}

    def own_part(
        self, state: Tree, *, take: Callable[[Tensor, Tensor], Tensor] | None = None, ranks: RankGroup = ALONE
    ) -> Tree:
        """This rank's part of a whole state, compared with the live one; see `TrainState.own_part`."""
        own = self.saved.own_part(state, take=take, ranks=ranks)
        on_all_ranks(ranks, lambda: check_task_states(own.get("tasks", {}), self.context.tasks))
        return own

    def load(self, state: Tree) -> list[str]:
        """Restore a state of `own_part`; returns messages about reset or dropped parts."""
        core = self.ledger.core
        changed = [*self.changed_settings(state).values()]
        core.is_whole = False  # until all of it is loaded
        self.ledger.progress = Progress.from_state_dict(state["progress"])
        for name, theirs in state.get("tasks", {}).items():
            task = self.context.tasks.get(name)
            if task is not None and (theirs or task.state_dict()):
                task.load_state_dict(theirs)
        changed += self.saved.load_state_dict(state)
        self.begun = state["run"].get("begun") or {}
        core.learning_rates.load_state_dict(state.get("lr_schedule", {}), self.begun.get("lr_schedule", 0))
        core.is_whole = True
        return changed


def _each_taken(live: Mapping[str, Tensor], whole: Mapping[str, Any], take: Take) -> Tree:
    return {
        name: take(live.get(name, value), value) if isinstance(value, Tensor) else value
        for name, value in whole.items()
    }


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
    described = {
        name: (_described(saved.get(name), None), _described(live.get(name), formats.get(name)))
        for name in {**live, **saved}
    }
    faults = [
        f"{name} is {found} instead of {wanted}" for name, (found, wanted) in described.items() if found != wanted
    ]
    if faults:
        raise CheckpointError(
            f"the checkpoint's {what} does not fit this one: {first_of(faults, 5, '; ')}. Build the model of the "
            f"checkpoint."
        )


def _described(tensor: Tensor | None, dtype: torch.dtype | None) -> str:
    return "missing" if tensor is None else f"{format_name(dtype or tensor.dtype)} {list(tensor.shape)}"
