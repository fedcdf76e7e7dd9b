"""Half of 1F1B's activations with about half of its bubble, or a third for about two thirds, on every rank alike.

Stages go through the ranks and back; each rank keeps at most (P+2)//2 or (P+4)//3 micro-batches of its share. They are
V-Half and V-Min (Qi et al. 2024, arXiv:2405.15362), which differ only in how long a leg of the way takes.
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.schedule import v_shaped
from evenstep.pipeline.schedules.v_blocks import in_blocks


def v_half(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """Outputs and gradients take two slots per rank on the way down, one on the way up; see `Order`.

    >>> print(*v_half(Layout.chain(ranks=2, stages_per_rank=2, v_shaped=True), [0, 1])[1])
    1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    return in_blocks("v_half", layout, microbatches, legs=(2, 1, 2, 1))


def v_min(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """Every leg takes one slot per rank; see `Order`.

    >>> print(*v_min(Layout.chain(ranks=3, stages_per_rank=2, v_shaped=True), [0, 1])[0])
    0F0 0F1 5F0 5I0 5F1 5I1 5W0 5W1 0I0 0W0 0I1 0W1
    """
    return in_blocks("v_min", layout, microbatches, legs=(1, 1, 1, 1))


V_HALF = v_shaped("v_half", v_half, summary="half of 1F1B's memory and about half of its bubble")

V_MIN = v_shaped("v_min", v_min, summary="a third of 1F1B's memory, two thirds of its bubble")
