"""One forward, one backward: as soon as a rank can go backward it does so, and so keeps few activations.

Stage s of P runs P-1-s forwards ahead. The bubble is GPipe's, (P-1)(f+b), but only min(M, P-s) activations live at
once. It is PipeDream-Flush (Narayanan et al. 2021, arXiv:2104.04473).
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.demands import one_stage_per_rank
from evenstep.pipeline.schedules.schedule import Schedule


def one_f_one_b(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """Forwards, then F and B in turns, on one stage per rank; see `Order`.

    >>> print(*one_f_one_b(Layout.chain(ranks=2), [0, 1, 2])[0])
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    stages = one_stage_per_rank("1f1b", layout, instead="interleaved")
    return tuple(alternated(stage, microbatches, ahead=layout.stages - 1 - stage) for stage in stages)


def alternated(stage: int, microbatches: Sequence[int], *, ahead: int) -> Plan:
    """Forwards and backwards of one stage in turns, forwards `ahead` micro-batches in front.

    >>> print(*alternated(0, [0, 1, 2], ahead=0))
    0F0 0B0 0F1 0B1 0F2 0B2
    """
    ahead = min(ahead, len(microbatches))
    forwards = [Action(Op.FORWARD, stage, microbatch) for microbatch in microbatches]
    backwards = [Action(Op.BACKWARD, stage, microbatch) for microbatch in microbatches]
    turns = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :])


ONE_F_ONE_B = Schedule(
    name="1f1b", order=one_f_one_b, summary="backward as soon as possible: GPipe's time, less memory"
)
