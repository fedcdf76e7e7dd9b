"""Checks that a process which was started as one of several has been told to train with the others."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Mesh, Single, Strategy, rank_info_of
from evenstep.parallel.rank_info import elastic_rank_of
from evenstep.pipeline import PipelineModel
from evenstep.pipeline.pipeline_model import in_stages
from evenstep.precision import Precision
from evenstep.train.failures import Stop
from evenstep.train.failures.policies import Policies


def check_launched(strategy: Strategy | str | None, model: nn.Module, environ: Mapping[str, str]) -> None:
    """Raise ArgumentError where this process was started as one of several, but has not been told to train with them.

    Args:
        strategy: as it was given; None if it was not.
    """
    _check_elastic(strategy, environ)
    alone = isinstance(strategy, Strategy) and strategy.ranks == 1 and not isinstance(strategy, Single)
    if alone and dist.is_initialized():
        return  # a process that has joined the others, and trains by itself now, does so on purpose
    if not (strategy is None or alone) or (isinstance(model, PipelineModel) and model.mesh.world.ranks > 1):
        return
    if "RANK" in environ and "WORLD_SIZE" not in environ:
        return  # not a launcher's
    info = rank_info_of(environ)
    if info is None or info.ranks == 1:
        return
    if alone:
        name = type(strategy).__name__
        raise ArgumentError(
            f"this process was started as {info}, but `strategy`, {name}, was given a group of one, so each would "
            f"train alone: give `{name}(Processes(device))` to train together, or `strategy=Single()` of "
            f"`evenstep.parallel` if each is a run of its own, in a folder of its own."
        )
    raise ArgumentError(
        f"this process was started as {info}, but `strategy` was not given, so each would train alone: give "
        f'`strategy="ddp"` (or "fsdp", "zero1") to train together, or `strategy=Single()` of '
        f"`evenstep.parallel` if each is a run of its own, in a folder of its own."
    )


def check_covers(strategy: Strategy, model: nn.Module) -> None:
    """Raise ArgumentError unless the strategy's ranks, with those of the model's other stages, are all that there are.

    All ranks call it together.
    """
    group, name = strategy.group, type(strategy).__name__
    if group.part_of and not in_stages(model):
        raise ArgumentError(
            f"`strategy`, {name}, is for {group.ranks} of the run's {group.part_of} ranks, and "
            f"{type(model).__name__} is not in stages that the others would hold, so they would train apart: give "
            f"`PipelineModel(model, mesh=mesh)`, or give the strategy all ranks, `{name}(mesh.world)`. What is to "
            f"train apart is started apart."
        )
    if isinstance(model, PipelineModel):
        _check_columns(strategy, model.mesh)


def check_own_models(strategy: Strategy, policies: Policies, precision: Precision, *, averages: bool) -> None:
    """Raise ArgumentError where ranks that train a model each would go different ways.

    Args:
        averages: whether a hook averages these models.
    """
    ranks = strategy.data_group.ranks
    if ranks == strategy.group.ranks:
        return
    if not averages:
        raise ArgumentError(
            f"`strategy` is single, but there are {ranks} ranks, so each would train a model of its own: choose "
            f"another, or add a hook that averages the models, such as `evenstep.contrib.local_sgd:LocalSgd`.",
            field="strategy",
        )
    if precision.retries_overflow or not isinstance(policies.non_finite, Stop):
        raise ArgumentError(
            "ranks that train a model each can't repeat or skip updates by themselves: use a precision without a loss "
            'scale, and `failures.non_finite = "stop"`.',
            field="strategy",
        )


def _check_columns(strategy: Strategy, mesh: Mesh) -> None:
    """Raise ArgumentError unless the strategy's ranks are those that hold the same stages, in their order."""
    group, data = strategy.group, mesh.data
    if group.ranks != data.ranks:
        raise ArgumentError(
            f"the strategy must share gradients between the {data.ranks} data-parallel ranks of the model's mesh, but "
            f"has a group of {group.ranks}; build it from `mesh.data`."
        )
    if group is data:
        return
    wanted, found = [mesh.rank_at(replica) for replica in range(data.ranks)], group.gather(mesh.world.rank)
    if found != wanted:
        raise ArgumentError(
            f"the strategy must share gradients between ranks {_listed(wanted)}, which hold the same stages, but has a "
            f"group of ranks {_listed(found)}; build it from `mesh.data`, of the mesh that the model has."
        )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _check_elastic(strategy: Strategy | str | None, environ: Mapping[str, str]) -> None:
    """Raise ArgumentError for a strategy whose group knows nothing of the others that may come and go."""
    if isinstance(strategy, Single) or (isinstance(strategy, Strategy) and strategy.group.can_change):
        return
    elastic = elastic_rank_of(environ)
    if elastic is not None and elastic.count > 1:
        said = f'"{strategy}"' if isinstance(strategy, str) else type(strategy).__name__
        given = "was not given" if strategy is None else f"knows only ranks that stay ({said})"
        raise ArgumentError(
            f"this process was started as {elastic.number} of {elastic.count} that may come and go (REPLICA_GROUP_ID), "
            f"but `strategy` {given}, so each would train without the others: give `strategy=Ordered(Elastic("
            f"Lighthouse(elastic_rank_of(os.environ)), timeout_s=60))`, with names of `evenstep.extras.elastic`, or "
            f"`strategy=Single()` of `evenstep.parallel` if each is a run of its own, in a folder of its own."
        )
