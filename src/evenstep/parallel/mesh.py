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
    """All ranks, and this rank's two groups among them.

    Args:
        world: all ranks; the first one speaks and writes files.
        data: those that hold the same stages, which sum their gradients.
        pipeline: those that hold the stages of one replica, in the order of their stages.

    Raises:
        ArgumentError: groups that are not those of one grid, or not of all ranks.

    >>> Mesh().pipeline.ranks
    1
    """

    world: Group = field(default_factory=Group)
    data: Group = field(default_factory=Group)
    pipeline: Group = field(default_factory=Group)

    def __post_init__(self) -> None:
        if self.world.part_of:
            raise ArgumentError(
                f"`world` must be all ranks of the run, but is {self.world.ranks} of {self.world.part_of}; "
                f"give `Processes(device)`, since a part of the ranks can't be divided again.",
                field="world",
            )
        data, pipeline = self.data, self.pipeline
        if (self.world.ranks, self.world.rank) != (data.ranks * pipeline.ranks, self.rank_at(data.rank)):
            raise ArgumentError(
                f"rank = pipeline rank · replicas + data rank in a mesh, but rank {self.world.rank} of "
                f"{self.world.ranks} is {data.rank} of {data.ranks} in `data` and {pipeline.rank} of {pipeline.ranks} "
                f"in `pipeline`; let `Mesh.of(world, pipeline=…)` divide the ranks."
            )

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
        columns = [range(stage * replicas, (stage + 1) * replicas) for stage in range(pipeline)]
        rows = [range(replica, world.ranks, replicas) for replica in range(replicas)]
        if replicas > 1:
            data = world.split([list(column) for column in columns])
        else:
            data = Group()  # the only rank that holds its stages
            data.part_of = pipeline
        return cls(world=world, data=data, pipeline=world.split([list(row) for row in rows]))


def check_pipelines(ranks: int, pipeline: int) -> None:
    """Raise ArgumentError unless so many ranks can be divided into pipelines of `pipeline` ranks."""
    if pipeline < 1 or ranks % pipeline:
        raise ArgumentError(
            f"`ranks` must be a multiple of the {pipeline} pipeline ranks, but is {ranks}; start "
            f"{max(pipeline, ranks // max(pipeline, 1) * pipeline)} ranks, or change `pipeline`.",
            field="ranks",
        )
