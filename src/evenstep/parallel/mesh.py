"""The ranks of a run as a grid with named axes: "pp", the stages of a pipeline, and "dp", its replicas.

Rank = pipeline rank · replicas + data rank. All ranks of one pipeline read the same batches.
"""

from collections.abc import Mapping
from typing import Self, final

import torch

from evenstep.arguments import require_whole
from evenstep.errors import ArgumentError
from evenstep.parallel.group import Group


@final
class Mesh:
    """All ranks, and this rank's group along each axis; all ranks build it together.

    `sizes` are the ranks along each axis, the slowest first. `lines` are the ranks of the world along each axis, among
    them this one. `data` are the ranks that hold the same stages and sum their gradients, `pipeline` those that hold
    the stages of one replica, in the order of their stages.
    """

    def __init__(self, world: Group | None = None, sizes: Mapping[str, int] | None = None) -> None:
        self.world = world or Group()
        sizes = sizes or {"pp": 1, "dp": self.world.ranks}
        grid = torch.arange(self.world.ranks).view(*sizes.values())
        self.lines: dict[str, list[int]] = {}
        groups: dict[str, Group] = {}
        for number, (axis, size) in enumerate(sizes.items()):
            lines: list[list[int]] = grid.movedim(number, -1).reshape(-1, size).tolist()  # pyright: ignore[reportUnknownMemberType]
            self.lines[axis] = next(line for line in lines if self.world.rank in line)
            groups[axis] = _group(self.world, lines)
        self.data, self.pipeline = groups["dp"], groups["pp"]

    @classmethod
    def of(cls, world: Group, *, pipeline: int = 1) -> Self:
        """Divide `world` into pipelines of `pipeline` ranks; all ranks call it together.

        >>> Mesh.of(Group()).data.ranks
        1
        """
        require_whole("pipeline", pipeline, at_least=1, advice="1 cuts nothing")
        check_pipelines(world.ranks, pipeline)
        return cls(world, {"pp": pipeline, "dp": world.ranks // pipeline})


def _group(world: Group, lines: list[list[int]]) -> Group:
    if len(lines) == 1:
        return world
    if len(lines[0]) > 1:
        return world.split(lines)
    alone = Group()
    alone.part_of = world.ranks
    return alone


def check_pipelines(ranks: int, pipeline: int) -> None:
    """Raise ArgumentError unless so many ranks can be divided into pipelines of `pipeline` ranks."""
    if ranks % pipeline:
        raise ArgumentError(
            f"`ranks` must be a multiple of the {pipeline} pipeline ranks, but is {ranks}; start another number of "
            f"ranks, or change `pipeline`.",
            field="ranks",
        )
