"""ZB-H1 with more forwards ahead: a smaller bubble for more memory.

What is left of the bubble between a rank's first and last action is (P-1)(f+i-2w), nothing if all three take as long;
in exchange up to 2P-1 activations live at once. It is ZB-H2 (Qi et al. 2023, arXiv:2401.10241).
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.demands import one_stage_per_rank
from evenstep.pipeline.schedules.schedule import Schedule
from evenstep.pipeline.schedules.zb_h1 import split_alternated


def zb_h2(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """F and I in turns, W when 2P-1 activations live, on one stage per rank; see `Order`.

    >>> print(*zb_h2(Layout.chain(ranks=2), range(4))[0])
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    """
    most = 2 * layout.stages - 1
    return tuple(
        split_alternated(stage, microbatches, ahead=most - 1 - 2 * stage, max_live=most)
        for stage in one_stage_per_rank("zb_h2", layout, instead="zb_v")
    )


ZB_H2 = Schedule(name="zb_h2", order=zb_h2, summary="hardly any bubble, twice the memory of 1F1B", splits_backward=True)
