"""No bubble between a rank's first and last action, with the memory of 1F1B, where f, i and w take as long.

Stages go through the ranks and back, so that the rank that begins also computes the loss and its gradients come back
early. Each rank first fills the pipe with forwards of its first stage, then does all six actions of its two stages in
turn, and at the end puts off gradients of weights to send those of inputs sooner. At most P micro-batches of a rank's
share live at once. It is ZB-V (Qi et al. 2023, arXiv:2401.10241).
"""

from collections import Counter
from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.demands import check_v
from evenstep.pipeline.schedules.schedule import v_shaped


def zb_v(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """All six actions of two stages in turns, on stages that go through the ranks and back; see `Order`.

    With fewer than 2P-1 micro-batches the order is that of 2P-1 with the missing ones left out.

    >>> print(*zb_v(Layout.chain(ranks=2, stages_per_rank=2, v_shaped=True), range(3))[1])
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    check_v("zb_v", layout)
    plans: list[Plan] = [()] * layout.ranks
    for depth in range(layout.ranks):
        plans[layout.rank_of[depth]] = _plan(depth, layout.ranks, microbatches)
    return tuple(plans)


def _plan(depth: int, ranks: int, microbatches: Sequence[int]) -> Plan:
    count = max(len(microbatches), 2 * ranks - 1)
    from_below = ranks - depth
    rounds = count - from_below - depth  # in which all six actions are done, as long as there are forwards
    turns = [
        ("F0", 2 * from_below - 1),
        ("F1 F0", depth),
        ("F1 I1 W1", from_below),
        ("F0 I0 W0 F1 I1 W1", rounds),
        ("I0 I1", depth),
        ("I0 W0", from_below),
        ("W1 W0", count),
    ]
    ops = {"F": Op.FORWARD, "I": Op.INPUT_BACKWARD, "W": Op.WEIGHT_BACKWARD}
    stages = depth, 2 * ranks - 1 - depth
    done: Counter[str] = Counter()
    plan: list[Action] = []
    for turn, times in turns:
        names = turn.split()
        left = len(microbatches) - min(done[name] for name in names)
        for name in names * min(times, left):  # what is left out at the end of a turn is many, where ranks are many
            place = done[name]
            done[name] += 1
            if place < len(microbatches):
                plan.append(Action(ops[name[0]], stages[int(name[1])], microbatches[place]))
    return tuple(plan)


ZB_V = v_shaped("zb_v", zb_v, summary="hardly any bubble, the memory of 1F1B")
