"""A third of 1F1B's activations, on every rank alike, for about two thirds of its bubble.

Stages go through the ranks and back; each rank keeps at most (P+4)//3 micro-batches of its share. It is V-Min (Qi et
al. 2024, arXiv:2405.15362).
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.v_blocks import in_blocks


def v_min(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """What each rank computes.

    Args:
        layout: of the stages, two per rank, which go through the ranks and back.
        microbatches: their global numbers, in ascending order.

    Raises:
        PlanError: the layout is no V.

    >>> print(*v_min(Layout.chain(ranks=2, stages_per_rank=2, v_shaped=True), [0, 1])[1])
    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    return in_blocks("v_min", layout, microbatches, legs=(1, 1, 1, 1))
