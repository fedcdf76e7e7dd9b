"""Refusals before a run begins. All other mistakes are left to Python, pydantic and torch.

The reason stands before each function: bits (updates would depend on the cut), hours (work would be lost), first hour.
"""

import inspect
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from evenstep.arguments import advice
from evenstep.data import Data, StreamData
from evenstep.errors import ArgumentError, TaskError
from evenstep.internals import unwrapped
from evenstep.optim.optimizers import has_own_state_dict, is_torchs, moded, parts_of, shard_refusal
from evenstep.options import SAVED_BY, Checkpointing
from evenstep.parallel import Group, Mesh, Single, Strategy, rank_info_of
from evenstep.parallel.rank_info import elastic_rank_of
from evenstep.pipeline import PipelineModel, pipeline_of
from evenstep.pipeline.pipeline_model import in_stages
from evenstep.precision import Precision, SixteenBits
from evenstep.train.blocks import check_compiled
from evenstep.train.build import Parts
from evenstep.train.failures import Answer, FailurePolicy, Policies
from evenstep.train.state.optimizer_state import parameter_names
from evenstep.train.tasks.task import evaluates_itself

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


# --- the process


# first hour, hours: N separate runs
def check_launched(strategy: Strategy | str | None, model: nn.Module, environ: Mapping[str, str] = os.environ) -> None:
    given = strategy if isinstance(strategy, Strategy) else None
    if isinstance(given, Single):
        return
    elastic = elastic_rank_of(environ)
    if elastic is not None and elastic.ranks > 1 and not (given is not None and given.group.can_change):
        raise ArgumentError(
            f"this process was started as {elastic.rank} of {elastic.ranks} that may come and go, but `strategy` "
            f"knows only ranks that stay: give `Ddp(Elastic(…))`, or `Single()` for separate runs.",
            field="strategy",
        )
    if strategy is not None and (given is None or given.group.ranks > 1 or dist.is_initialized()):
        return
    spans_ranks = isinstance(model, PipelineModel) and model.mesh.world.ranks > 1
    is_launched = "RANK" not in environ or "WORLD_SIZE" in environ
    info = rank_info_of(environ) if is_launched and not spans_ranks else None
    if info is not None and info.ranks > 1:
        raise ArgumentError(
            f'this process was started as {info}, but `strategy` names no other rank: give `strategy="ddp"` to train '
            f"together, or `strategy=Single()` for separate runs.",
            field="strategy",
        )


def check_parts(
    parts: Parts,
    data: Data | None = None,
    evaluations: Mapping[str, Data] = MappingProxyType({}),
    *,
    averages: bool = False,
) -> None:
    """Raise ArgumentError for parts of an engine that do not go together.

    Args:
        data: for training, and `evaluations` by name; None for a loop of one's own.
        averages: a hook averages the models of ranks that train one each.
    """
    model, strategy, precision = parts.model, parts.strategy, parts.precision
    _check_covers(strategy, model)
    _check_own_models(parts, averages=averages)
    check_optimizer(parts.optimizer, model=model, strategy=strategy, precision=precision)
    precision.check(parts.device)
    _check_layers(parts)
    if parts.train.compile == "model":
        check_compiled(model, strategy)
    _check_tasks(parts, data, evaluations)


# bits
def _check_covers(strategy: Strategy, model: nn.Module) -> None:
    group = strategy.group if strategy.group.part_of else strategy.data_group
    has_columns = not isinstance(model, PipelineModel) or _shares_columns(strategy.group, model.mesh)
    if (group.part_of and not in_stages(model)) or not has_columns:
        raise ArgumentError(
            f"`strategy`, {type(strategy).__name__}, must share gradients between the ranks that hold the same stages: "
            f"build it from `mesh.data` of the model's mesh, or without stages from all ranks.",
            field="strategy",
        )


def _shares_columns(group: Group, mesh: Mesh) -> bool:
    if group is mesh.data:
        return True
    return group.ranks == mesh.data.ranks and group.gather(mesh.world.rank) == mesh.replicas


# bits
def _check_own_models(parts: Parts, *, averages: bool) -> None:
    ranks = parts.strategy.data_group.ranks
    if ranks == parts.strategy.group.ranks:
        return
    if not averages:
        raise ArgumentError(
            f"`strategy` is single, but there are {ranks} ranks, so each would train another model: choose `ddp`, or "
            f"add a hook that averages the models, such as `evenstep.contrib.local_sgd:LocalSgd`.",
            field="strategy",
        )
    policy = parts.policies.non_finite
    always_stops = type(policy) is FailurePolicy and policy.answer is Answer.STOP
    if parts.precision.retries_overflow or not always_stops:
        raise ArgumentError(
            "ranks that train a model each can't repeat or skip updates by themselves: use a precision without a loss "
            'scale, and `failures.non_finite = "stop"`.',
            field="strategy",
        )


# --- the model


# first hour
def check_model(model: nn.Module) -> None:
    """Raise EvenstepError unless the model is unwrapped, on one device, and has parameters to train."""
    for name, part in model.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith("torch.")}
        if wrapper := next((kind for kind in _WRAPPERS if kind in kinds), ""):
            raise ArgumentError(
                f"`{name or 'model'}` is wrapped in torch's {wrapper}: give the unwrapped model, and a `strategy`.",
                field="model",
            )
    check_material(model)
    parameters = list(model.parameters())
    if not any(pipeline_of(model).gather(any(one.requires_grad for one in parameters))):
        what = f"all {len(parameters)} parameters are frozen" if parameters else "it has no parameters"
        raise TaskError(f"the model ({type(model).__name__}) has nothing to train: {what}.", field="model")
    devices = sorted({str(one.device) for one in parameters})
    if len(devices) > 1:
        raise TaskError(f"the model must be on one device, but is on {', '.join(devices)}.", field="model")


# first hour
def check_material(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, UninitializedParameter) or tensor.is_meta:
            raise TaskError(
                f"`{name}` is lazy or on the meta device, so it has no values: call the model once, or `to_empty(…)`.",
                field=name,
            )
        if hasattr(tensor, "to_local"):
            raise ArgumentError(
                f"`{name}` is a DTensor: give the whole model, and a `strategy` such as `Fsdp`.", field=name
            )


# bits: a layer says in `evenstep_not_for` which runs it is not for
def _check_layers(parts: Parts) -> None:
    holds_float32 = parts.precision.keeps_masters and parts.strategy.layout.divides == "elements"
    kinds = {
        "changing ranks": parts.strategy.group.can_change,
        "16 bits": isinstance(parts.precision, SixteenBits) and not holds_float32,
        "compile": parts.train.compile != "off",
    }
    for name, module in parts.model.named_modules():
        not_for: Mapping[str, str] = getattr(module, "evenstep_not_for", {})
        for kind in not_for:
            if kinds[kind]:
                raise ArgumentError(f"`{name}` is a {type(module).__name__}, {not_for[kind]}.", field=name)


# --- the optimizer


# first hour: an optimizer of other parameters; bits
def check_optimizer(optimizer: Optimizer, *, model: nn.Module, strategy: Strategy, precision: Precision) -> None:
    held = {name for names in parameter_names(model, optimizer) for name in names}
    by_name = dict(unwrapped(model).named_parameters())
    precision.check_trained({name: one for name, one in by_name.items() if one.requires_grad and name in held})
    for one in parts_of(optimizer):
        step: Any = inspect.unwrap(type(one).step)
        closure = inspect.signature(step).parameters.get("closure")
        needs = closure is not None and closure.default is inspect.Parameter.empty and not is_torchs(one)
        if isinstance(one, LBFGS) or needs:
            raise ArgumentError(
                f"`optimizer` must step from one gradient, but {type(one).__name__} evaluates the loss in its step.",
                field="optimizer",
            )
    for one in moded(optimizer) if precision.format is not None else ():
        raise ArgumentError(
            f"{type(one).__name__} evaluates other parameters than it trains, which precision '{precision.name}' does "
            f"not hold: use a mixed precision, or another optimizer.",
            field="precision",
        )
    if strategy.layout.divides == "nothing" and not in_stages(model):
        return
    shards = strategy.layout.divides == "elements"
    why = shard_refusal(optimizer, elements=shards)
    if not why and (told := [type(one).__name__ for one in parts_of(optimizer) if has_own_state_dict(one)]):
        why = f"{told[0]} has a `state_dict` of its own, of which the parts can't be put together"
    if why:
        cut = "with `fsdp` each rank steps a part of every parameter" if shards else "each rank steps some parameters"
        instead = "take `zero1` or `ddp`" if shards else "train without stages" if in_stages(model) else "take `ddp`"
        raise ArgumentError(f"{cut}, but {why}: {instead}.", field="optimizer")


# --- the run


# hours
def check_keeping(folder: object, policies: Policies, checkpoint: Checkpointing) -> None:
    asked = [name for name in SAVED_BY if getattr(checkpoint, name) is not None] + policies.rewinding
    if asked and folder is None:
        raise ArgumentError(
            f"`{asked[0]}` needs checkpoints, but there is no `folder` to save in: give one, `folder='runs/first'`.",
            field="folder",
        )
    keep_last = checkpoint.keep_last
    for name in policies.rewinding:
        if keep_last is not None and keep_last < 2:
            raise ArgumentError(f"`{name}` rewinds, which needs `keep_last` 2 or more, but is {keep_last}.", field=name)


# --- the tasks


# first hour, hours
def _check_tasks(parts: Parts, data: Data | None, evaluations: Mapping[str, Data]) -> None:
    model, tasks = parts.model, parts.tasks
    stream = data.moving_stream if isinstance(data, StreamData) else None
    given = {"`data`": data} | {f"the evaluation '{name}'": one for name, one in evaluations.items()}
    for what, one in given.items():
        for name in (one and one.tasks) or ():
            if name not in tasks:
                raise ArgumentError(
                    f"{what} has batches of task `{name}`, which the run has not; {advice(name, tasks)}",
                    field=name,
                )
        if one is not data and isinstance(one, StreamData) and stream is not None and one.moving_stream is stream:
            raise ArgumentError(
                f"{what} reads the stream that `data` reads, but must not move it: give it its own.",
                field="evaluations",
            )
    is_staged = isinstance(model, PipelineModel)
    if is_staged and (parts.coefficients.are_learned or parts.combine is not None):
        raise ArgumentError(
            "learned coefficients, `combine`, and `late_weight` beside other tasks can't be used in stages, where no "
            "rank holds the model.",
            field="combine",
        )
    for name, task in tasks.items():
        if task.uses_average and parts.train.ema is None:
            raise ArgumentError(
                f"task `{name}` has `uses_average`, but the run has no average: give `train=Training(ema=Ema(…))`.",
                field="ema",
            )
        needs = "uses_average" if task.uses_average else "evaluate" if evaluates_itself(task) else ""
        if needs and (is_staged or parts.strategy.layout.divides == "elements"):
            raise ArgumentError(
                f"task `{name}` calls the whole model (`{needs}`), which no rank holds in stages or shards; train with "
                f"`ddp` or `zero1`, or evaluate its checkpoints on one process.",
                field=needs,
            )
