"""Opens a run: its values, the Python objects that they name, and the group of its ranks."""

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast, final

from evenstep.arguments import choose
from evenstep.config.load import Setting, Tree, read, refused_at, validated
from evenstep.config.run import RunConfig
from evenstep.config.target import importable
from evenstep.errors import ConfigError, clause
from evenstep.parallel import Group, Processes, device_of_rank, rank_info_of
from evenstep.parallel.mesh import check_pipelines
from evenstep.parallel.rank_info import ElasticRank, elastic_rank_of, is_launched
from evenstep.parallel.strategies import check_single
from evenstep.pipeline import SCHEDULES, Layout
from evenstep.pipeline.layers import stages_per_rank_for


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run without faults.

    Args:
        tables: its run file with its overrides, as a run folder keeps it.
        recipe: the folder of the recipe's Python files, importable while the run is open.
    """

    config: RunConfig
    tables: Tree
    recipe: Path

    def plain(self) -> Tree:
        """Its tables in values that JSON has, which checkpoints keep."""
        return cast("Tree", json.loads(json.dumps(self.tables, default=str)))


@contextmanager
def open_run(path: Path, settings: Sequence[Setting] = ()) -> Generator[OpenRun]:
    """Read the run of `path`, and keep its recipe importable inside the `with`.

    Args:
        settings: values over those of the file, the later the stronger: the environment's, then the command line's.

    Raises:
        ConfigError: with everything that is wrong.
    """
    tables = read(path, settings)
    folders = {key: path.resolve().parent / str(tables.get(key, ".")) for key in ("recipe", "paths")}
    recipe = folders["recipe"]
    if not recipe.is_dir():
        raise ConfigError(f"`recipe` must be a folder, but there is no {recipe}; set `recipe` to one.")
    with importable(recipe):
        config = validated(tables, settings, folders)
        faults = list(config.faults())
        for check in (build_layout, check_ranks):
            try:
                check(config)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)
        tables |= {"recipe": "recipe", "paths": str(folders["paths"].resolve())}
        yield OpenRun(config=config, tables=tables, recipe=recipe.resolve())


def build_layout(config: RunConfig) -> Layout:
    """The chain of stages that the pipeline schedule runs on the ranks of one pipeline."""
    parallel = config.parallel
    count = parallel.stages_per_rank or stages_per_rank_for(parallel.split_at or None, ranks=parallel.pipeline)
    with refused_at("parallel.pipeline"):
        schedule = choose("pipeline_schedule", parallel.pipeline_schedule, SCHEDULES)
        return schedule.layout(parallel.pipeline, count if parallel.pipeline > 1 else None)


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
