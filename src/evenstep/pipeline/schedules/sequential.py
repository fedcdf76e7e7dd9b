"""Each micro-batch through all stages forward, then at once through all of them backward, before the next begins.

F0 B0 F1 B1 … One micro-batch's activations live at a time. Over several ranks nothing overlaps: it is the order that a
pipeline's gradients are compared with. With one stage it is ordinary training.
"""

from collections.abc import Sequence

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.schedule import Schedule


def sequential(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """F0 B0 F1 B1 … through all stages; see `Order`.

    >>> print(*sequential(Layout.chain(ranks=1, stages_per_rank=2), [0, 1])[0])
    0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
    """
    plans: list[Plan] = []
    for rank in range(layout.ranks):
        stages = layout.stages_of(rank)
        plans.append(
            tuple(
                action
                for microbatch in microbatches
                for action in (
                    *(Action(Op.FORWARD, stage, microbatch) for stage in stages),
                    *(Action(Op.BACKWARD, stage, microbatch) for stage in reversed(stages)),
                )
            )
        )
    return tuple(plans)


SEQUENTIAL = Schedule(
    name="sequential",
    order=sequential,
    summary="one micro-batch at a time: nothing overlaps, least memory",
    max_stages_per_rank=None,
)
