"""All forwards, then all backwards.

With P ranks and M micro-batches the bubble is (P-1)(f+b) and all M activations live at once: for few micro-batches, or
to compare with. It is GPipe (Huang et al. 2019, arXiv:1811.06965) for one stage per rank.
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.demands import one_stage_per_rank
from evenstep.pipeline.schedules.schedule import Schedule


def gpipe(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """F0 F1 … B0 B1 … on one stage per rank; see `Order`.

    >>> print(*gpipe(Layout.chain(ranks=2), [0, 1])[1])
    1F0 1F1 1B0 1B1
    """
    return tuple(
        tuple(Action(op, stage, microbatch) for op in (Op.FORWARD, Op.BACKWARD) for microbatch in microbatches)
        for stage in one_stage_per_rank("gpipe", layout, instead="breadth_first")
    )


GPIPE = Schedule(name="gpipe", order=gpipe, summary="all forwards, then all backwards")
