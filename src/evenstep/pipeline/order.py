"""Start times of all actions of a set of plans, after the actions that they need.

A forward needs the forwards that feed it, a backward its forward and the backwards of the stages that it feeds.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from evenstep.errors import PlanError
from evenstep.pipeline.action import COMPUTES, Action, Op, Plan
from evenstep.pipeline.layout import Layout


class Span(NamedTuple):
    """One compute action, when it ran.

    Args:
        start, end: in the caller's unit of time.
    """

    rank: int
    action: Action
    start: float
    end: float


Result = tuple[bool, int, int]  # whether an output (else a gradient), of which stage and micro-batch


def spans(
    plans: Sequence[Plan],
    layout: Layout,
    duration: Callable[[Action], float],
) -> list[Span]:
    """Start and end of every compute action, each as early as the order of its rank and its needs allow.

    Args:
        plans: one per rank; whatever is no compute action in them is passed over.
        duration: of an action.

    Returns:
        All spans, sorted by start and rank.

    >>> from evenstep.pipeline.schedules import gpipe
    >>> layout = Layout.chain(ranks=2)
    >>> [f"{s.action}@{s.start}" for s in spans(gpipe(layout, [0]), layout, lambda action: 1)]
    ['0F0@0', '1F0@1', '1B0@2', '0B0@3']
    """
    orders = [[action for action in plan if action.op in COMPUTES] for plan in plans]
    places = [0] * len(orders)
    free: list[float] = [0] * len(orders)
    ends: dict[Result, float] = {}
    waiting: dict[Result, list[int]] = {}  # ranks by the message that they wait for
    found: list[Span] = []
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        while places[rank] < len(orders[rank]):
            action = orders[rank][places[rank]]
            needed = _needed(action, layout)
            lacking = next((result for result in needed if result not in ends), None)
            if lacking is not None:
                waiting.setdefault(lacking, []).append(rank)
                break
            start = max([free[rank], *(ends[result] for result in needed)])
            free[rank] = end = start + duration(action)
            found.append(Span(rank, action, start, end))
            places[rank] += 1
            if action.op is not Op.WEIGHT_BACKWARD:
                result = action.op is Op.FORWARD, action.stage, action.microbatch
                ends[result] = end
                ready += waiting.pop(result, ())
    _check_all_ran(orders, places)
    return sorted(found, key=lambda span: (span.start, span.rank))


def _needed(action: Action, layout: Layout) -> list[Result]:
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return [(True, source, microbatch) for source in layout.sources(stage)]
    if action.op is Op.WEIGHT_BACKWARD:
        return [(False, stage, microbatch)]
    gradients = [(False, peer, microbatch) for peer in layout.destinations(stage)]
    return [(True, stage, microbatch), *gradients]


def _check_all_ran(orders: Sequence[Sequence[Action]], places: Sequence[int]) -> None:
    stuck = [
        f"rank {rank} at {order[place]}"
        for rank, (order, place) in enumerate(zip(orders, places, strict=True))
        if place < len(order)
    ]
    if stuck:
        raise PlanError(
            f"the plans cannot be run to their end: {', '.join(stuck[:8])} cannot begin, because what it needs comes "
            f"later on its own rank, never, or on a rank that waits as well; put each action after what it needs."
        )
