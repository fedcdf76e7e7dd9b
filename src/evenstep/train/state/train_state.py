"""Model, optimizer, average and loss scale as a tree by parameter name, and their restoring."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arguments import first_of, format_name
from evenstep.checkpoint import ALONE, RankGroup, Shard, on_all_ranks
from evenstep.errors import ArgumentError, CheckpointError
from evenstep.internals import unwrapped
from evenstep.optim.ema import Average, Ema
from evenstep.optim.stepper import Stepper
from evenstep.parallel import ParameterLayout, ShardedTensorRef, States, mapped
from evenstep.pipeline.pipeline_model import in_stages
from evenstep.precision import LossScale
from evenstep.tensors import load_state, named_parameters, plain, state_of
from evenstep.train.state import Tree
from evenstep.train.state.optimizer_state import (
    changed_options,
    check_optimizer,
    load_optimizer,
    make_plain,
    optimizer_state,
    options_of,
)
from evenstep.train.state.pipeline_state import PipelineStateSharding
from evenstep.train.trained import TrainedParameters


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of each parameter group's parameters."""
    names = {id(parameter): name for name, parameter in named_parameters(unwrapped(model)).items()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ArgumentError(
                    f"parameter {place} of the optimizer's group {number}, of shape {list(parameter.shape)}, is not a "
                    f"parameter of the model; build the optimizer from this model's `parameters()`, after everything "
                    f"that replaces them."
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


@final
@dataclass(slots=True, kw_only=True)
class TrainState:
    """The tensors of a run.

    Args:
        model: unwrapped.
        optimizer: of its parameters, or of those that this rank steps.
        names: of each of the optimizer's groups' parameters, over all ranks.
        loss_scale: the loss scale, whose state is saved.
        stepper: takes the steps; its masters, if any, are the values of the parameters.
        averaged_as: the formats in which the average takes parameters that are held in others, by name.
        sharding: which part of the whole model this rank holds.

    Attributes:
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
    sharding: PipelineStateSharding = field(default_factory=PipelineStateSharding)
    average: Average | None = field(init=False)
    _own: list[list[str]] = field(init=False)
    _built: list[Tree] = field(init=False)
    _outlines: dict[str, tuple[torch.Size, torch.dtype]] = field(init=False)

    def __post_init__(self) -> None:
        self._own = parameter_names(self.model, self.optimizer)
        make_plain(self.optimizer)
        self._built = options_of(self.optimizer)
        self._outlines = _outlines_of(self.model)
        self.average = None if self.ema is None else Average(self.ema, self.model, self.averaged_as)

    def fault(self) -> str:
        now = _outlines_of(self.model)
        if now == self._outlines:
            return ""
        was = self._outlines
        name = next(one for one in (*now, *was) if now.get(one) != was.get(one))
        return (
            f"`{name}` of the model was {_outlined(was.get(name))} when the run was built and is "
            f"{_outlined(now.get(name))} now, as forwards may make buffers, so it does not fit the model that a "
            f"resumed run builds; register it in `__init__` with its last shape and write into it "
            f"(`self.{name.rpartition('.')[2]}.copy_(…)`), or, if it can be computed anew, let no checkpoint hold it "
            f"(`register_buffer(…, persistent=False)`)"
        )

    def state_dict(self, *, whole: bool = True) -> Tree:
        """The parts "model", "optimizer", "ema" (empty without one), "precision" and "trained"; on all ranks together.

        Args:
            whole: False to leave tensors that are cut over ranks as they are, which costs no memory.
        """
        taken = partial(mapped, act=self.layout.gather_full if whole else _as_shard)
        tree = self._tree(taken, self.layout.optimizer_state)
        return self.sharding.gathered({**tree, "trained": self.trained.state_dict()})

    def part(self) -> Tree:
        tree, others = self._tree(dict, lambda states: states), self.stepper.rounded - self.stepper.masters.keys()
        elsewhere = _under_all_names(self.model, dict.fromkeys(others))  # ranks that hold their masters give them
        model = {name: one for name, one in tree["model"].items() if name not in elsewhere}
        return self.sharding.part({**tree, "model": model, "trained": self.trained.state_dict()})

    def _tree(self, taken: Callable[[Mapping[str, Any]], Tree], of_all: Callable[[States], States]) -> Tree:
        if fault := self.fault():
            raise CheckpointError(f"the state can't be saved, since it could not be resumed: {fault}.")
        self.trained.check_groups()
        state = optimizer_state(self.optimizer, self._own, self._built)
        own = {name: one.detach() for name, one in self.stepper.masters.items()}
        everybody = of_all(_with_masters(state["state"], own))
        for group, names in zip(state["groups"], self.names, strict=True):
            group["parameters"] = list(names)
        model = taken(state_of(self.model))
        states = {name: taken(everybody[name]) for names in self.names for name in names if name in everybody}
        masters = {name: one.pop(_MASTER) for name, one in states.items() if _MASTER in one}
        return {
            "model": {**model, **_under_all_names(self.model, masters)},
            "optimizer": {**state, "state": {name: one for name, one in states.items() if one}},
            "ema": {} if self.average is None else taken(self.average.state_dict()),
            "precision": self.loss_scale.state_dict(),
        }

    def _check(self, state: Tree) -> None:
        masters = _under_all_names(self.model, dict.fromkeys(self.stepper.rounded, torch.float32))
        check_fits(state["model"], state_of(self.model), "model", formats=masters)
        _check_tied(state["model"], self.model)
        if state["optimizer"] is not None:
            check_optimizer(state["optimizer"], self.optimizer, self.names)
        if self.average is not None and state["ema"]:
            check_fits(state["ema"], self.average.state_dict(), "average")

    def changed_options(self, state: Tree) -> list[str]:
        if state["optimizer"] is None:
            return []
        return changed_options(state["optimizer"], self._built)

    def own_part(
        self, state: Tree, *, take: Callable[[Tensor, Tensor], Tensor] | None = None, ranks: RankGroup = ALONE
    ) -> Tree:
        """This rank's part of a whole state, after it has been compared with the live one; nothing is changed.

        Args:
            state: whose optimizer may be None, which then stays as it is.
            take: gives what of a whole tensor a live one holds, cut as that is: `ParameterLayout.scatter_like`, or a
                reader's.
            ranks: all of which raise if one does.
        """
        own = self.sharding.own(state)

        def fitting() -> Tree:
            self._check(own)
            return self._taken(own, take or self.layout.scatter_like)

        return on_all_ranks(ranks, fitting)

    def _taken(self, state: Tree, take: Callable[[Tensor, Tensor], Tensor]) -> Tree:
        live = state_of(self.model)
        stepped = {name: live[name] for group in self._own for name in group}
        optimizer: Tree | None = state["optimizer"]
        saved: Tree = {} if optimizer is None else optimizer["state"]
        states = {
            name: {key: mapped(value, partial(take, tensor)) for key, value in saved[name].items()}
            for name, tensor in stepped.items()
            if name in saved
        }
        average = {} if self.average is None else self.average.state_dict()
        return {
            **state,
            "model": _each_taken(live, state["model"], take),
            "optimizer": None if optimizer is None else {**optimizer, "state": states},
            "ema": state["ema"] if not average else _each_taken(average, state["ema"], take),
        }

    def load_state_dict(self, state: Tree) -> list[str]:
        load_state(self.model, state["model"])
        self.stepper.load_masters(state["model"])
        if state["optimizer"] is not None:
            load_optimizer(state["optimizer"], self.optimizer, self._own, self._built)
        self.loss_scale.load_state_dict(state["precision"])
        changed = self._load_average(state["ema"])
        self.trained.load_state_dict(state.get("trained", {}))
        return changed

    def _load_average(self, saved: Tree) -> list[str]:
        if self.average is None:
            return ["the average of the parameters is given up"] if saved else []
        if saved:
            self.average.load_state_dict(saved)
            return []
        self.average.restart()
        return ["the average of the parameters is new and begins as a copy of them"]


def _each_taken(live: Mapping[str, Tensor], whole: Mapping[str, Any], take: Callable[[Tensor, Tensor], Tensor]) -> Tree:
    return {name: take(live[name], value) if isinstance(value, Tensor) else value for name, value in whole.items()}


_MASTER = "master"  # beside an optimizer's state of a parameter, on its way to those who save


def _with_masters(states: Tree, masters: Mapping[str, Tensor]) -> Tree:
    return {**states, **{name: {**states.get(name, {}), _MASTER: master} for name, master in masters.items()}}


def _under_all_names(model: nn.Module, values: Mapping[str, Any]) -> Tree:
    if not values:
        return {}
    first = {id(parameter): name for name, parameter in named_parameters(model).items()}
    every = ((plain(name), first[id(one)]) for name, one in model.named_parameters(remove_duplicate=False))
    return {name: values[known] for name, known in every if known in values}


def _outlines_of(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (one.shape, one.dtype) for name, one in state_of(model).items()}


def _outlined(outline: tuple[torch.Size, torch.dtype] | None) -> str:
    return "not there" if outline is None else f"{format_name(outline[1])} of shape {[*outline[0]]}"


def _as_shard(tensor: Tensor | ShardedTensorRef) -> Tensor | Shard:
    if isinstance(tensor, Tensor):
        return tensor
    # of a tensor without elements, whoever holds it holds all
    local = tensor.local.new_empty(tensor.shape) if 0 in tensor.shape else tensor.local
    return Shard(local=local, shape=tensor.shape, offsets=(0,) * len(tensor.shape))


def check_fits(
    saved: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    what: str,
    *,
    formats: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Raise CheckpointError unless both have the same names, shapes and number formats.

    Args:
        formats: in which tensors of these names are saved, where that is not the format that they have.
    """
    faults = [f"{name} is missing" for name in live if name not in saved]
    faults += [f"{name} is not known here" for name in saved if name not in live]
    faults += [
        f"{name} has shape {list(saved[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in live.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    faults += [
        f"{name} is of {format_name(saved[name].dtype)} instead of {format_name(formats.get(name, tensor.dtype))}"
        for name, tensor in live.items()
        if name in saved and saved[name].dtype != formats.get(name, tensor.dtype)
    ]
    if faults:
        raise CheckpointError(
            f"the checkpoint's {what} does not fit this one: {first_of(faults, 5, '; ')}. Build the model that the "
            f"checkpoint was saved from."
        )


def _check_tied(saved: Mapping[str, Tensor], model: nn.Module) -> None:
    firsts: dict[int, str] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        name = plain(full)
        first = firsts.setdefault(id(parameter), name)
        one, other = saved.get(first), saved.get(name)
        if one is None or other is None or one is other or one.is_meta or other.is_meta or torch.equal(one, other):
            continue
        raise CheckpointError(
            f"`{first}` and `{name}` are one parameter of the model (tied), but two in the checkpoint, which differ. "
            f"Build the model that the checkpoint was saved from."
        )


def is_shared(model: nn.Module, layout: ParameterLayout) -> bool:
    return layout.divides != "nothing" or in_stages(model)
