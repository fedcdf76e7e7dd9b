"""From a user's arguments to objects that fit each other, checked before anything is changed or run.

`Engine` and `Trainer` begin with it. Names are made objects in `resolve`, and what is refused stands in `checks`; here
is the order in which they are asked.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.data import Data
from evenstep.events import Storage
from evenstep.oom import build_emptying
from evenstep.optim.optimizers import joined
from evenstep.optim.schedules import LrSchedule, plateaus_of
from evenstep.options import Training
from evenstep.parallel import Group, Strategy
from evenstep.pipeline import PipelineModel
from evenstep.precision import Precision
from evenstep.single_use import check_unused
from evenstep.train.blocks import Chosen, choose_modules
from evenstep.train.checks import (
    check_covers,
    check_launched,
    check_layers,
    check_model,
    check_optimizer,
    check_own_models,
    check_parameters,
    check_tasks,
    check_whole_model,
)
from evenstep.train.compiled import check_compiled
from evenstep.train.failures import Policies
from evenstep.train.linear_layers import choose_linear_layers
from evenstep.train.number_formats import check_formats
from evenstep.train.resolve import combine_named, device_of, lr_schedule_of, precision_of, strategy_of
from evenstep.train.tasks.metrics import build_storage
from evenstep.train.tasks.modules import attached
from evenstep.train.tasks.task import Task
from evenstep.train.tasks.tasks import Tasks, named
from evenstep.train.tasks.weighting import Fixed
from evenstep.training_mode import require_gradients

COMPUTES = {"update": "evenstep.contrib.compiled_update"}
"""Packages that compute updates, by the words of `Training.compile`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Checked objects that an engine is built from.

    Args:
        linear_layers: those that compute in a format of their own.
        recomputed: the modules whose activations are not kept.
        empty_cache: called with the number of each update that has ended; None where nothing is emptied.
        keeps: whether checkpoints are saved.
        compute: the package that computes updates, a `ComputePackage`; None: the engine does.
    """

    model: nn.Module
    tasks: Tasks
    optimizer: Optimizer
    strategy: Strategy
    precision: Precision
    lr_schedule: LrSchedule | None
    seed: int
    device: torch.device
    train: Training
    policies: Policies
    storage: Storage
    linear_layers: Chosen
    recomputed: Chosen
    empty_cache: Callable[[int], None] | None
    keeps: bool
    compute: Any

    @property
    def group(self) -> Group:
        """All ranks of the run."""
        return self.model.mesh.world if isinstance(self.model, PipelineModel) else self.strategy.data_group

    @property
    def kept(self) -> dict[str, object]:
        coefficients, policies = self.tasks.coefficients, self.policies
        spikes = policies.spikes
        named = {
            "coefficients": None if isinstance(coefficients, Fixed) else coefficients,
            "combine": self.tasks.combine,
            "lr_schedule": self.lr_schedule if plateaus_of(self.lr_schedule) else None,
            "non_finite": policies.non_finite,
            "out_of_memory": policies.out_of_memory,
            "loss_spike": spikes,
            "policy": None if spikes is None else spikes.policy,
            **{f"task {name}".strip(): task for name, task in self.tasks.by_name.items() if task.uses_average},
        }
        return {f"`{name}`": one for name, one in named.items() if one is not None and vars(one)}


def set_up(
    *,
    model: nn.Module,
    task: Task | Mapping[str, Task],
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy | str | None,
    precision: Precision | str | None,
    lr_schedule: LrSchedule | str | Mapping[str, Any] | None,
    seed: int,
    device: str | torch.device,
    train: Training,
    policies: Policies,
    data: Data | None = None,
    evaluations: Mapping[str, Data] = MappingProxyType({}),
    keeps: bool = False,
    averages: bool = False,
) -> Setup:
    """Make objects of an engine's arguments, and check what needs nothing to be changed or run.

    Args:
        data: for training, and `evaluations` for evaluation by name; none where a loop of one's own brings them.
        keeps: whether checkpoints are saved.
        averages: whether a hook averages the models of ranks that train one each.

    Raises:
        ArgumentError: an argument that cannot be, or that does not go with another.
        TaskError: a model that cannot be trained.
    """
    require_gradients("an engine or a trainer was built")
    check_launched(strategy, model, os.environ)
    check_model(model)
    optimizer = joined(optimizer)
    with attached(model, named(task), optimizer):
        formats, schedule = precision_of(precision), lr_schedule_of(lr_schedule)
        sharing = strategy_of(strategy, device, model)
        check_covers(sharing, model)
        check_own_models(sharing, policies, formats, averages=averages)
        check_parameters(model, optimizer, formats)
        on = device_of(device, formats)
        check_formats(formats, optimizer=optimizer, strategy=sharing)
        check_layers(model, strategy=sharing, precision=formats, train=train)
        if train.compile == "model":
            check_compiled(model, sharing)
        check_optimizer(optimizer, model=model, strategy=sharing)
        tasks = Tasks.of(task, train.coefficients, combine_named(train.combine), train.norm_statistics)
        check_tasks(tasks, data, evaluations, model=model, policy=policies.non_finite)
        check_whole_model(tasks.by_name, train.ema, model, sharing)
        for one in tasks.by_name.values():
            one.prepare(model)
        setup = Setup(
            model=model,
            tasks=tasks,
            optimizer=optimizer,
            strategy=sharing,
            precision=formats,
            lr_schedule=schedule,
            seed=seed,
            device=on,
            train=train,
            policies=policies,
            storage=build_storage(tasks.by_name, on, train.clip_norm),
            linear_layers=choose_linear_layers(model, formats),
            recomputed=choose_modules(model, train.memory.checkpoint),
            empty_cache=build_emptying(train.memory.empty_cache_every_updates, on),
            keeps=keeps,
            compute=import_module(COMPUTES[train.compile]) if train.compile in COMPUTES else None,
        )
        if setup.compute is not None:
            setup.compute.check(setup)
        check_unused(setup.kept)
        return setup
