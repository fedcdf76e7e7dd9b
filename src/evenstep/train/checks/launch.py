"""Checks that a process which was started as one of several has been told to train with the others."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from evenstep.errors import ArgumentError
from evenstep.parallel import Single, Strategy, rank_info_of
from evenstep.parallel.rank_info import elastic_rank_of
from evenstep.pipeline import PipelineModel


def check_launched(strategy: Strategy | str | None, model: nn.Module, environ: Mapping[str, str]) -> None:
    """Raise ArgumentError where this process was started as one of several, but has not been told to train with them.

    Args:
        strategy: as it was given; None if it was not.
        model: whose stages may be shared.
    """
    _check_elastic(strategy, environ)
    alone = isinstance(strategy, Strategy) and strategy.ranks == 1 and not isinstance(strategy, Single)
    if alone and dist.is_initialized():
        return  # a process that has joined the others, and trains by itself now, does so on purpose
    if not (strategy is None or alone) or (isinstance(model, PipelineModel) and model.mesh.world.ranks > 1):
        return
    if "RANK" in environ and "WORLD_SIZE" not in environ:
        return  # not a launcher's
    place = rank_info_of(environ)
    if place is None or place.ranks == 1:
        return
    if alone:
        name = type(strategy).__name__
        raise ArgumentError(
            f"this process was started as {place}, but `strategy`, {name}, was given a group of one, so each would "
            f"train alone: give `{name}(Processes(device))` to train together, or `strategy=Single()` of "
            f"`evenstep.parallel` if each is a run of its own, in a folder of its own."
        )
    raise ArgumentError(
        f"this process was started as {place}, but `strategy` was not given, so each would train alone: give "
        f'`strategy="ddp"` (or "fsdp", "zero1") to train together, or `strategy=Single()` of '
        f"`evenstep.parallel` if each is a run of its own, in a folder of its own."
    )


def _check_elastic(strategy: Strategy | str | None, environ: Mapping[str, str]) -> None:
    """Raise ArgumentError for a strategy whose group knows nothing of the others that may come and go."""
    if isinstance(strategy, Single) or (isinstance(strategy, Strategy) and strategy.group.can_change):
        return
    place = elastic_rank_of(environ)
    if place is not None and place.count > 1:
        said = f'"{strategy}"' if isinstance(strategy, str) else type(strategy).__name__
        given = "was not given" if strategy is None else f"knows only ranks that stay ({said})"
        raise ArgumentError(
            f"this process was started as {place.number} of {place.count} that may come and go (REPLICA_GROUP_ID), but "
            f"`strategy` {given}, so each would train without the others: give `strategy=Ordered(Elastic(Lighthouse("
            f"elastic_rank_of(os.environ)), timeout_s=60))`, with names of `evenstep.extras.elastic`, or "
            f"`strategy=Single()` of `evenstep.parallel` if each is a run of its own, in a folder of its own."
        )
