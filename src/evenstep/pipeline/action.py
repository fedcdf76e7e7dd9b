"""Plans as data: the actions of one rank in one update, and the stages that they act on."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Self, final

from evenstep.errors import PlanError


@final
class Op(Enum):
    """The kinds of action. The value is the letter by which plans are written and drawn."""

    FORWARD = "F"
    BACKWARD = "B"  # whole: gradients of inputs and of weights
    INPUT_BACKWARD = "I"  # gradients of inputs only; gradients of weights follow in WEIGHT_BACKWARD
    WEIGHT_BACKWARD = "W"
    SEND_OUTPUT = "SO"
    RECEIVE_INPUT = "RI"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    ARM = "A"  # the next backward of the stage is its last of this update
    REDUCE = "R"  # the stage's gradients are complete and are summed over data-parallel ranks
    UNSHARD = "US"  # gather the stage's parameters from the ranks that share them
    RESHARD = "RS"  # keep this rank's shards only

    # enum's own hash runs Python code, and checks hash millions of actions
    __hash__ = object.__hash__


COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do.

    Args:
        stage: number of the stage that acts, in the whole model, from 0.
        microbatch: global number of the micro-batch; -1 for ARM, REDUCE, UNSHARD and RESHARD.
        peer: of a communication, the stage at its other end; else -1.

    >>> str(Action(Op.FORWARD, 0, 3)), str(Action(Op.REDUCE, 1)), str(Action(Op.SEND_OUTPUT, 0, 3, 1))
    ('0F3', '1R', '0SO3:1')
    """

    op: Op
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        microbatch = str(self.microbatch) if self.microbatch >= 0 else ""
        peer = f":{self.peer}" if self.peer >= 0 else ""
        return f"{self.stage}{self.op.value}{microbatch}{peer}"


Plan = tuple[Action, ...]
"""Actions in the order in which a rank executes them."""


def described(action: Action) -> str:
    """An action in words.

    >>> described(Action(Op.FORWARD, 1, 3))
    'action 1F3 (forward, stage 1, micro-batch 3)'
    """
    microbatch = f", micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    name = action.op.name.lower().replace("_", " ")
    return f"action {action} ({name}, stage {action.stage}{microbatch})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Stages, their owners and the edges between them; equal on every rank.

    Args:
        rank_of: for each stage the pipeline rank that owns it; every rank owns one stage at least.
        edges: (source stage, destination stage) pairs with source < destination. A stage may feed several and be fed
            by several.

    PlanError for a rank without a stage, and an edge that goes backwards, twice or out of the model.
    """

    rank_of: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    _sources: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _destinations: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        missing = set(range(self.ranks)) - set(self.rank_of)
        if missing:
            raise PlanError(f"every pipeline rank must own a stage, but rank {min(missing)} owns none.")
        for edge in self.edges:
            if not 0 <= edge[0] < edge[1] < self.stages or self.edges.count(edge) > 1:
                raise PlanError(
                    f"an edge must go once from a stage to a later one of the {self.stages}, but one is {edge}."
                )
        for stage in range(self.stages):
            self._sources[stage] = tuple(here for here, there in self.edges if there == stage)
            self._destinations[stage] = tuple(there for here, there in self.edges if here == stage)

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
