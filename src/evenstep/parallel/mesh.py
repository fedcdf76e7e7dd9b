"""The ranks of a run as a grid: data-parallel replicas × pipeline stages.

Rank = pipeline rank · replicas + data rank. All ranks of one pipeline read the same batches.
"""

from dataclasses import dataclass, field
from typing import final

from evenstep.arguments import require_whole
from evenstep.errors import ArgumentError
from evenstep.parallel.group import Group


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """All ranks, and this rank's two groups among them, as `Mesh.of` divides them.

    Args:
        world: all ranks; the first one speaks and writes files.
        data: those that hold the same stages, which sum their gradients.
        pipeline: those that hold the stages of one replica, in the order of their stages.
    """

    world: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)
    pipeline: Group = field(default_factory=Group)

    def rank_at(self, replica: int) -> int:
        """Rank in the world that holds this rank's stages in replica number `replica`."""
        return self.pipeline.rank * self.data.ranks + replica

    @classmethod
    def of(cls, world: Group, *, pipeline: int = 1) -> "Mesh":
        """Divide `world` into pipelines of `pipeline` ranks; all ranks call it together.

        Raises:
            ArgumentError: the number of ranks is not a multiple of `pipeline`.

        >>> Mesh.of(Group()).data.ranks
        1
        """
        require_whole("pipeline", pipeline, at_least=1, advice="1 cuts nothing")
        check_pipelines(world.ranks, pipeline)
        if pipeline == 1:
            return cls(world=world, data=world)
        replicas = world.ranks // pipeline
        columns = [list(range(stage * replicas, (stage + 1) * replicas)) for stage in range(pipeline)]
        rows = [list(range(replica, world.ranks, replicas)) for replica in range(replicas)]
        data = world.split(columns) if replicas > 1 else Group()  # the only rank that holds its stages
        if replicas == 1:
            data.part_of = pipeline
        return cls(world=world, data=data, pipeline=world.split(rows))


def check_pipelines(ranks: int, pipeline: int) -> None:
    """Raise ArgumentError unless so many ranks can be divided into pipelines of `pipeline` ranks."""
    if ranks % pipeline:
        raise ArgumentError(
            f"`ranks` must be a multiple of the {pipeline} pipeline ranks, but is {ranks}; start another number of "
            f"ranks, or change `pipeline`.",
            field="ranks",
        )
