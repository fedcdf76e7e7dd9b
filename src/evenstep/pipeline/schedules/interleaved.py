"""1F1B over v stages per rank, which go round the ranks; a rank turns to its next stage after P micro-batches.

The bubble is a v-th of GPipe's, (P-1)(f+b)/v; in exchange there are v times as many messages, and the rank of stage s<P
keeps ((v-1)P + 2(P-1-s) + 1)/v micro-batches of its share alive. Where the ranks do not divide the micro-batches, the
order is that of the next multiple with the missing ones left out. It is interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473).
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.demands import check_loop
from evenstep.pipeline.schedules.schedule import Schedule


def interleaved(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """1F1B in groups of P micro-batches, on stages that go round the ranks; see `Order`.

    >>> print(*interleaved(Layout.chain(ranks=2, stages_per_rank=2), range(4))[1])
    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
    check_loop("interleaved", layout)
    return tuple(_plan(layout, rank, microbatches) for rank in range(layout.ranks))


def _plan(layout: Layout, rank: int, microbatches: Sequence[int]) -> Plan:
    ranks, stages, count = layout.ranks, layout.stages_of(rank), len(microbatches)
    groups = [range(first, first + ranks) for first in range(0, count, ranks)]
    forwards = [(Op.FORWARD, stage, place) for group in groups for stage in stages for place in group]
    backwards = [(Op.BACKWARD, stage, place) for group in groups for stage in stages[::-1] for place in group]
    ahead = min(2 * (ranks - 1 - stages[0]) + (len(stages) - 1) * ranks, len(forwards))
    turns = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
    order = [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]
    return tuple(Action(op, stage, microbatches[place]) for op, stage, place in order if place < count)


INTERLEAVED = Schedule(
    name="interleaved",
    order=interleaved,
    summary="1F1B over several stages per rank: less bubble, more messages",
    min_stages_per_rank=2,
    max_stages_per_rank=None,
)
