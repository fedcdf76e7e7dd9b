"""The model of a run: whole on each rank, or in stages where the configuration asks for a pipeline.

Without the other ranks (`evenstep check` where there is no room for them) one process runs all stages, one after the
other, so that what cannot be cut or scheduled is found.
"""

from torch import nn

from evenstep.arguments import choose
from evenstep.config.faults import refused_at
from evenstep.config.schema import Config
from evenstep.parallel import Group, Mesh
from evenstep.pipeline import SCHEDULES, Layers, Layout, PipelineModel
from evenstep.pipeline.layers import check_covered
from evenstep.pipeline.split import cut, flows, stages_per_rank_for


def build_mesh(config: Config, group: Group) -> Mesh:
    """The grid of `group`'s ranks.

    Raises:
        ConfigError: they can't be divided into pipelines.
    """
    with refused_at("parallel.pipeline"):
        return Mesh.of(group, pipeline=config.parallel.pipeline)


def build_layout(config: Config) -> Layout:
    """The chain of stages that the pipeline schedule runs on the ranks of one pipeline.

    Raises:
        ArgumentError: there is no such schedule, or it is for other numbers of stages.
    """
    parallel = config.parallel
    schedule = choose("pipeline_schedule", parallel.pipeline_schedule, SCHEDULES)
    count = parallel.stages_per_rank or stages_per_rank_for(parallel.split_at or None, ranks=parallel.pipeline)
    with refused_at("parallel.pipeline"):
        return schedule.layout(parallel.pipeline, count if parallel.pipeline > 1 else None)


def check_stages(config: Config, made: nn.Module | Layers) -> None:
    """Raise ArgumentError for a model that can't be cut or scheduled as is asked for, without ranks and their stages.

    Args:
        made: what the model's target gave.
    """
    parallel = config.parallel
    chain = build_layout(config)
    with refused_at("parallel.pipeline"):
        layers = Layers.of(made)
        check_covered(made, layers)
        places = cut(layers, stages=chain.stages, split_at=parallel.split_at or None)
        edges = flows(layers, places)
        layout = Layout(rank_of=chain.rank_of, edges=tuple(edges))
        SCHEDULES[parallel.pipeline_schedule].plans(layout, range(2 * parallel.pipeline))


def build_model(config: Config, made: nn.Module | Layers, mesh: Mesh | None) -> nn.Module:
    """The model as it is trained.

    Args:
        made: what the model's target gave.
        mesh: the ranks; None to run all stages here.

    Raises:
        ArgumentError: a pipeline schedule that can't run this model's stages.
    """
    parallel = config.parallel
    if parallel.pipeline == 1 and isinstance(made, nn.Module):
        return made
    stages = build_layout(config).stages
    with refused_at("parallel.pipeline"):
        return PipelineModel(
            made,
            mesh=mesh,
            schedule=parallel.pipeline_schedule,
            stages_per_rank=stages // (1 if mesh is None else mesh.pipeline.ranks),
            split_at=parallel.split_at or None,
            seed=config.seed,
        )
