"""Stages of a model: their ranks and the edges between them.

Says which pipeline rank owns each stage and which stage feeds which; equal on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, final

from evenstep.errors import PlanError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Stages, their owners and the edges between them.

    Args:
        rank_of: for each stage the pipeline rank that owns it; every rank owns one stage at least.
        edges: (source stage, destination stage) pairs with source < destination. A stage may feed several and be fed
            by several: the graph is a DAG in the order of the stages' numbers.

    Raises:
        PlanError: a rank without a stage, an edge that goes backwards, twice or out of the model.

    >>> Layout(rank_of=(0, 1), edges=((0, 1),)).stages_of(1)
    (1,)
    """

    rank_of: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    _sources: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _destinations: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = sorted(set(range(self.ranks)) - set(self.rank_of))
        if missing:
            raise PlanError(f"every pipeline rank must own a stage, but rank {missing[0]} owns none of {self.rank_of}.")
        for edge in self.edges:
            if not 0 <= edge[0] < edge[1] < self.stages or self.edges.count(edge) > 1:
                raise PlanError(
                    f"an edge must go once from a stage to a later one of the {self.stages}, but one is {edge}."
                )
        object.__setattr__(self, "_sources", self._by_stage((there, here) for here, there in self.edges))
        object.__setattr__(self, "_destinations", self._by_stage(self.edges))

    @classmethod
    def chain(cls, *, ranks: int, stages_per_rank: int = 1, v_shaped: bool = False) -> Self:
        """Each stage feeds the next; owners go round the ranks, or down and up again where `v_shaped`.

        >>> Layout.chain(ranks=2, stages_per_rank=2).rank_of
        (0, 1, 0, 1)
        >>> Layout.chain(ranks=2, stages_per_rank=2, v_shaped=True).rank_of
        (0, 1, 1, 0)
        """
        stages = ranks * stages_per_rank
        turn = [stage // ranks % 2 == 1 and v_shaped for stage in range(stages)]
        owners = tuple(ranks - 1 - s % ranks if turn[s] else s % ranks for s in range(stages))
        return cls(rank_of=owners, edges=tuple((stage, stage + 1) for stage in range(stages - 1)))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return max(self.rank_of) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages that feed `stage`."""
        return self._sources[stage]

    def destinations(self, stage: int) -> tuple[int, ...]:
        """The stages that `stage` feeds."""
        return self._destinations[stage]

    def _by_stage(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.rank_of]
        for stage, other in pairs:
            found[stage].append(other)
        return tuple(map(tuple, found))
