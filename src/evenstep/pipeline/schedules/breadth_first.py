"""All micro-batches through a rank's first stage, then all through its next; backward the other way round.

The bubble is that of interleaved 1F1B, (P-1)(f+b)/v, with all M micro-batches alive; each stage's weights are needed
in one stretch forward and one backward, which suits sharded parameters. With one stage per rank it is GPipe. It is
breadth-first pipeline parallelism (Lamy-Poirier 2022, arXiv:2211.05953).
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.schedule import Schedule


def breadth_first(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """Stage after stage for all micro-batches, on any stages; see `Order`.

    >>> print(*breadth_first(Layout.chain(ranks=2, stages_per_rank=2), [0, 1])[1])
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    plans: list[Plan] = []
    for rank in range(layout.ranks):
        stages = layout.stages_of(rank)
        forwards = [Action(Op.FORWARD, stage, each) for stage in stages for each in microbatches]
        backwards = [Action(Op.BACKWARD, stage, each) for stage in reversed(stages) for each in microbatches]
        plans.append((*forwards, *backwards))
    return tuple(plans)


BREADTH_FIRST = Schedule(
    name="breadth_first",
    order=breadth_first,
    summary="stage after stage for all micro-batches: for sharded weights",
    min_stages_per_rank=2,
    max_stages_per_rank=None,
)
