"""The model of a run: whole on each rank, or in stages where the configuration asks for a pipeline.

Without the other ranks (`evenstep check` where there is no room for them) one process runs all stages, one after the
other, so that what cannot be cut or scheduled is found.
"""

from difflib import get_close_matches

from torch import nn

from evenstep.config.schema import Config
from evenstep.errors import ArgumentError, ConfigError, PlanError
from evenstep.parallel import Group, Mesh
from evenstep.pipeline import SCHEDULES, Layers, PipelineModel


def build_mesh(config: Config, group: Group) -> Mesh:
    """The grid of `group`'s ranks.

    Raises:
        ConfigError: they can't be divided into pipelines.
    """
    if group.ranks % config.parallel.pipeline:
        fault = (
            f"`parallel.pipeline` is {config.parallel.pipeline}, but {group.ranks} rank(s) were started; start a "
            f"multiple of it, or change it."
        )
        raise ConfigError([fault])
    return Mesh.of(group, pipeline=config.parallel.pipeline)


def build_model(config: Config, made: nn.Module | Layers, mesh: Mesh | None) -> nn.Module:
    """The model as it is trained.

    Args:
        config: of the run.
        made: what the model's target gave.
        mesh: the ranks; None to run all stages here.

    Raises:
        ConfigError: a pipeline schedule that is not known, or that can't run this model's stages.
    """
    parallel = config.parallel
    if parallel.pipeline_schedule not in SCHEDULES:
        close = get_close_matches(parallel.pipeline_schedule, SCHEDULES, n=1)
        advice = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(SCHEDULES)}."
        raise ConfigError([f"`parallel.pipeline_schedule` is `{parallel.pipeline_schedule}`, which is none; {advice}"])
    if parallel.pipeline == 1 and isinstance(made, nn.Module):
        return made
    ranks, schedule = parallel.pipeline, SCHEDULES[parallel.pipeline_schedule]
    split_at = parallel.split_at or None
    count = parallel.stages_per_rank
    if count is None and split_at is not None:
        count = -(-(len(split_at) + 1) // ranks)
    try:
        chain = schedule.layout(ranks, count if ranks > 1 else None)
        here = chain.stages // (1 if mesh is None else mesh.pipeline.ranks)
        return PipelineModel(
            made,
            mesh=mesh,
            schedule=schedule.name,
            stages_per_rank=here,
            split_at=split_at,
            relay_skips=parallel.relay_skips,
            seed=config.seed,
        )
    except (ArgumentError, PlanError) as error:
        raise ConfigError([f"`parallel.pipeline` is {ranks}, but {error}"]) from error
