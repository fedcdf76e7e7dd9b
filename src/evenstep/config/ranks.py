"""Ranks of a run: their number, their group, and how they share gradients."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module

from evenstep.arguments import choose
from evenstep.config.load import refused_at
from evenstep.config.run import RunConfig
from evenstep.errors import ConfigError, clause
from evenstep.parallel import Group, Processes, device_of_rank, rank_info_of
from evenstep.parallel.mesh import check_pipelines
from evenstep.parallel.rank_info import ElasticRank, elastic_rank_of, is_launched
from evenstep.parallel.strategies import check_single
from evenstep.pipeline import SCHEDULES, Layout
from evenstep.pipeline.layers import stages_per_rank_for


@contextmanager
def joined(config: RunConfig) -> Generator[Group]:
    """The group of all ranks of this run inside the `with`; ConfigError for several with a strategy for one."""
    info, elastic = rank_info_of(os.environ), elastic_rank_of(os.environ)
    ranks = 1 if info is None else info.ranks
    may_go_on = config.launch.lost_rank == "continue"
    if elastic is not None and elastic.count > 1 and not may_go_on:
        raise ConfigError(
            '`launch.lost_rank` must be "continue" for a process with REPLICA_GROUP_ID in its environment; set it, or '
            "unset that variable."
        )
    with refused_at("parallel"):
        check_single(config.parallel.strategy, ranks, has_hooks=bool(config.hooks))
    if may_go_on and (elastic is not None or ranks > 1):
        group = _elastic(config, elastic)
    else:
        group = Processes(device_of_rank(config.device), timeout_s=config.parallel.timeout_s) if ranks > 1 else Group()
    try:
        yield group
    except BaseException as error:
        group.fail(clause(error))
        raise
    finally:
        group.close()


def _elastic(config: RunConfig, place: ElasticRank | None) -> Group:
    device = device_of_rank(config.device)
    if place is None or device.type != "cpu":
        raise ConfigError(
            f'`launch.lost_rank` "continue" is for CPUs and for ranks that `--launch.ranks` starts, but the device '
            f"is {device} and the ranks were started {'together' if place is None else 'one by one'}."
        )
    elastic = import_module("evenstep.contrib.elastic")
    return elastic.Elastic(elastic.Lighthouse(place), timeout_s=config.parallel.timeout_s)


def check_ranks(config: RunConfig) -> None:
    """Raise ConfigError for a number of ranks that the strategy or pipelines can't have."""
    slurm = config.launch.slurm
    job = 1 if slurm is None else slurm.nodes * slurm.ranks_per_node
    ranks = max(config.launch.ranks, config.parallel.pipeline, job)  # 1 also where another launcher starts them
    with refused_at("launch.ranks"):
        check_single(config.parallel.strategy, ranks, has_hooks=bool(config.hooks))
        check_pipelines(ranks, config.parallel.pipeline)
    if config.launch.lost_rank == "continue" and ranks == 1 and not is_launched():
        raise ConfigError('`launch.lost_rank` "continue" needs 2 or more ranks; set `launch.ranks`.')


def build_layout(config: RunConfig) -> Layout:
    """The chain of stages that the pipeline schedule runs on the ranks of one pipeline."""
    parallel = config.parallel
    count = parallel.stages_per_rank or stages_per_rank_for(parallel.split_at or None, ranks=parallel.pipeline)
    with refused_at("parallel.pipeline"):
        schedule = choose("pipeline_schedule", parallel.pipeline_schedule, SCHEDULES)
        return schedule.layout(parallel.pipeline, count if parallel.pipeline > 1 else None)
