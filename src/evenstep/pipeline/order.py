"""When each action of a set of plans can start: every rank in its own order, every action after what it needs.

A forward needs the forwards of the stages that feed it, a backward its own forward and the backwards of the stages that
it feeds, a weight-backward its input-backward. Starts follow from that alone, since each rank's order is given. It
knows durations only as numbers that the caller gives, and communication only as a delay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from evenstep.errors import PlanError
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout

COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)


@final
@dataclass(frozen=True, slots=True)
class Span:
    """One compute action, when it ran.

    Args:
        rank: that ran it.
        action: forward or a kind of backward.
        start: in the caller's unit of time.
        end: in the same unit.
    """

    rank: int
    action: Action
    start: float
    end: float


@final
class Needs:
    """Which stages feed which, in one layout.

    Args:
        layout: of the stages.

    >>> Needs(Layout.chain(ranks=3)).destinations
    [[1], [2], []]
    """

    def __init__(self, layout: Layout) -> None:
        self.sources: list[list[int]] = [[] for _ in range(layout.stages)]
        self.destinations: list[list[int]] = [[] for _ in range(layout.stages)]
        for source, destination in layout.edges:
            self.sources[destination].append(source)
            self.destinations[source].append(destination)


Ends = dict[tuple[int, int], float]  # by stage and micro-batch


def spans(
    plans: Sequence[Plan],
    layout: Layout,
    duration: Callable[[Action], float],
    delays: Mapping[tuple[int, int], float] | None = None,
) -> list[Span]:
    """Start and end of every compute action, each as early as the order of its rank and its needs allow.

    Args:
        plans: one per rank; whatever is no compute action in them is passed over.
        layout: of the stages.
        duration: of an action.
        delays: how long messages take, by edge, in either direction; 0 by default.

    Returns:
        All spans, sorted by start and rank.

    Raises:
        PlanError: the ranks wait for each other in a circle, or for something that no plan makes.

    >>> from evenstep.pipeline.schedules.gpipe import gpipe
    >>> layout = Layout.chain(ranks=2)
    >>> [f"{s.action}@{s.start}" for s in spans(gpipe(layout, [0]), layout, lambda action: 1)]
    ['0F0@0', '1F0@1', '1B0@2', '0B0@3']
    """
    needs, delays = Needs(layout), delays or {}
    orders = [[action for action in plan if action.op in COMPUTES] for plan in plans]
    places = [0] * len(orders)
    free: list[float] = [0] * len(orders)
    outputs: Ends = {}
    gradients: Ends = {}
    waiting: dict[tuple[int, int], list[int]] = {}  # by the stage and micro-batch of what they lack
    found: list[Span] = []
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while places[rank] < len(order):
            action = order[places[rank]]
            start = _start(action, free[rank], needs, outputs, gradients, delays)
            if isinstance(start, tuple):
                waiting.setdefault(start, []).append(rank)
                break
            free[rank] = end = start + duration(action)
            found.append(Span(rank, action, start, end))
            places[rank] += 1
            if action.op is not Op.WEIGHT_BACKWARD:
                unit = action.stage, action.microbatch
                (outputs if action.op is Op.FORWARD else gradients)[unit] = end
                ready += waiting.pop(unit, ())
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
    return sorted(found, key=lambda span: (span.start, span.rank))


def _start(
    action: Action,
    free: float,
    needs: Needs,
    outputs: Ends,
    gradients: Ends,
    delays: Mapping[tuple[int, int], float],
) -> float | tuple[int, int]:
    """When `action` can start if its rank is free at `free`; else the stage and micro-batch whose result it lacks."""
    stage, microbatch = action.stage, action.microbatch
    start = free
    if action.op is Op.FORWARD:
        for source in needs.sources[stage]:
            end = outputs.get((source, microbatch))
            if end is None:
                return source, microbatch
            start = max(start, end + delays.get((source, stage), 0))
        return start
    own = (gradients if action.op is Op.WEIGHT_BACKWARD else outputs).get((stage, microbatch))
    if own is None:
        return stage, microbatch
    if action.op is not Op.WEIGHT_BACKWARD:
        for destination in needs.destinations[stage]:
            end = gradients.get((destination, microbatch))
            if end is None:
                return destination, microbatch
            start = max(start, end + delays.get((stage, destination), 0))
    return start
