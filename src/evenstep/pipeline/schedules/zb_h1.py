"""1F1B with the backward in two halves: gradients of inputs at once, those of weights when there is nothing else to do.

The next rank waits for gradients of inputs only, so that the others can fill the bubble: what is left of it is
(P-1)(f+i-w) between a rank's first and last action. No rank keeps more than P activations, the most that 1F1B does.
It is ZB-H1 (Qi et al. 2023, arXiv:2401.10241).
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.demands import one_stage_per_rank
from evenstep.pipeline.schedules.schedule import Schedule


def zb_h1(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """F and I in turns, W when P activations live, on one stage per rank; see `Order`.

    >>> print(*zb_h1(Layout.chain(ranks=2), [0, 1, 2])[1])
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    count = layout.stages
    return tuple(
        split_alternated(stage, microbatches, ahead=count - 1 - stage, max_live=count)
        for stage in one_stage_per_rank("zb_h1", layout, instead="zb_v")
    )


def split_alternated(stage: int, microbatches: Sequence[int], *, ahead: int, max_live: int) -> Plan:
    """Forwards and input-backwards of one stage in turns, weight-backwards where the next forward has no room else.

    Args:
        ahead: by how many micro-batches forwards are in front.
        max_live: the most activations that may live at once.

    >>> print(*split_alternated(0, [0, 1, 2], ahead=1, max_live=2))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    """
    count = len(microbatches)
    ahead = min(ahead, count)
    plan = [Action(Op.FORWARD, stage, microbatch) for microbatch in microbatches[:ahead]]
    forwards, weights = ahead, 0
    for microbatch in microbatches:
        if forwards < count:
            plan.append(Action(Op.FORWARD, stage, microbatches[forwards]))
            forwards += 1
        plan.append(Action(Op.INPUT_BACKWARD, stage, microbatch))
        if forwards - weights == max_live or forwards == count:
            plan.append(Action(Op.WEIGHT_BACKWARD, stage, microbatches[weights]))
            weights += 1
    plan += [Action(Op.WEIGHT_BACKWARD, stage, microbatch) for microbatch in microbatches[weights:]]
    return tuple(plan)


ZB_H1 = Schedule(
    name="zb_h1", order=zb_h1, summary="1F1B whose bubble is filled with gradients of weights", splits_backward=True
)
