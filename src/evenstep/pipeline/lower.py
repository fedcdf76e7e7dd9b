"""Complete plans from orders of computation: adds sends, receives and reductions of gradients.

Both ends of a transfer stand at one moment of one clock, so ranks never wait for each other in a circle.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from evenstep.errors import PlanError
from evenstep.pipeline.action import COMPUTES, Action, Layout, Op, Plan

# On the common clock a whole backward takes as long as its halves together. Only the order of the ends matters.
UNITS = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.INPUT_BACKWARD: 1, Op.WEIGHT_BACKWARD: 1}


class Span(NamedTuple):
    """One compute action, with its start and end in the caller's unit of time."""

    rank: int
    action: Action
    start: float
    end: float


Result = tuple[bool, int, int]  # True for an output, False for a gradient; stage; micro-batch


def spans(plans: Sequence[Plan], layout: Layout, duration: Callable[[Action], float]) -> list[Span]:
    """Start and end of every compute action, each as early as the order of its rank and its needs allow.

    The spans are sorted by start and rank; PlanError if an action needs what comes later on its rank, or never.
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
    stuck = [f"rank {rank} at {order[places[rank]]}" for rank, order in enumerate(orders) if places[rank] < len(order)]
    if stuck:
        raise PlanError(
            f"the plans can't come to their end: {', '.join(stuck[:8])} can't begin; put each action after its inputs."
        )
    return sorted(found, key=lambda span: (span.start, span.rank))


def _needed(action: Action, layout: Layout) -> list[Result]:
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return [(True, source, microbatch) for source in layout.sources(stage)]
    if action.op is Op.WEIGHT_BACKWARD:
        return [(False, stage, microbatch)]
    return [(True, stage, microbatch), *((False, peer, microbatch) for peer in layout.destinations(stage))]


def lower(plans: Sequence[Plan], layout: Layout) -> tuple[Plan, ...]:
    """Add to each rank's computations its communication, and ARM and REDUCE around its stages' last backwards.

    A send stands right after what makes its content; a receive stands where its content comes into being. PlanError
    if ranks wait for each other in a circle.

    >>> from evenstep.pipeline.schedules import breadth_first
    >>> layout = Layout.chain(ranks=2)
    >>> for plan in lower(breadth_first(layout, [0, 1]), layout):
    ...     print(*plan)
    0F0 0SO0:1 0F1 0SO1:1 0RG0:1 0B0 0RG1:1 0A 0B1 0R
    1RI0:0 1F0 1RI1:0 1F1 1B0 1SG0:0 1A 1B1 1SG1:0 1R
    """
    return tuple(_reduced(plan, layout.stages_of(rank)) for rank, plan in enumerate(_communicating(plans, layout)))


def executed(plan: Plan, stages: Sequence[int], *, overlaps: bool = True, gathers: bool = False) -> Plan:
    """A rank's plan as its stages execute it.

    All replicas reduce their stages from the last to the first. A reduction that would begin beside a backward before
    that of a later stage has its ARM right before its REDUCE.

    Args:
        overlaps: whether reductions may begin beside a backward at all.
        gathers: whether parameters are gathered once per plan.

    >>> plan = Action(Op.ARM, 0), Action(Op.BACKWARD, 0, 3), Action(Op.REDUCE, 2), Action(Op.REDUCE, 0)
    >>> print(*executed(plan, [0, 2], gathers=True))
    0US 2US 0B3 2A 2R 0A 0R 0RS 2RS
    """
    unreduced, armed = list(stages), set[int]()
    line = [Action(Op.UNSHARD, stage) for stage in stages if gathers]
    for action in plan:
        if action.op is Op.ARM:
            if not overlaps or unreduced[-1] != action.stage:
                continue
            armed.add(action.stage)
        elif action.op is Op.REDUCE:
            unreduced.remove(action.stage)
            if action.stage not in armed:
                line.append(Action(Op.ARM, action.stage))
        line.append(action)
    return (*line, *(Action(Op.RESHARD, stage) for stage in stages if gathers))


def forwards(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
    """The forward-only plans of all ranks, with their communication, for evaluation.

    Whatever a rank could do next, it does for the latest stage, so that few outputs wait anywhere.
    """
    lacking = {(s, k): len(layout.sources(s)) for s in range(layout.stages) for k in range(len(microbatches))}
    ready: list[list[tuple[int, int]]] = [[] for _ in range(layout.ranks)]
    for (stage, place), count in lacking.items():
        if count == 0:
            heappush(ready[layout.rank_of[stage]], (-stage, place))
    orders: list[list[Action]] = [[] for _ in range(layout.ranks)]
    while any(ready):
        now = [(-stage, place) for stage, place in (heappop(heap) for heap in ready if heap)]
        for stage, place in now:
            orders[layout.rank_of[stage]].append(Action(Op.FORWARD, stage, microbatches[place]))
            for destination in layout.destinations(stage):
                lacking[destination, place] -= 1
                if lacking[destination, place] == 0:
                    heappush(ready[layout.rank_of[destination]], (-destination, place))
    return _communicating([tuple(order) for order in orders], layout)


def _communicating(plans: Sequence[Plan], layout: Layout) -> tuple[Plan, ...]:
    # A transfer at the time of a start comes before it: its content exists already. Each event: time, whether it is a
    # computation, its number, and what happens on which rank.
    events: list[tuple[float, bool, int, tuple[tuple[int, Action], ...]]] = []
    for span in spans(plans, layout, lambda action: UNITS[action.op]):
        events.append((span.start, True, len(events), ((span.rank, span.action),)))
        first = len(events)
        events += [(span.end, False, first + n, ends) for n, ends in enumerate(_transfers(span, layout))]
    events.sort()
    lines: list[list[Action]] = [[] for _ in range(layout.ranks)]
    for _, _, _, actions in events:
        for rank, action in actions:
            lines[rank].append(action)
    return tuple(map(tuple, lines))


def _transfers(span: Span, layout: Layout) -> Iterator[tuple[tuple[int, Action], ...]]:
    op, stage, microbatch = span.action.op, span.action.stage, span.action.microbatch
    if op is Op.WEIGHT_BACKWARD:
        return
    forward = op is Op.FORWARD
    send, receive = (Op.SEND_OUTPUT, Op.RECEIVE_INPUT) if forward else (Op.SEND_GRADIENT, Op.RECEIVE_GRADIENT)
    for peer in layout.destinations(stage) if forward else layout.sources(stage):
        rank = layout.rank_of[peer]
        if rank != span.rank:
            yield (span.rank, Action(send, stage, microbatch, peer)), (rank, Action(receive, peer, microbatch, stage))


def _reduced(plan: Plan, stages: Sequence[int]) -> Plan:
    last: dict[int, int] = {}
    end: dict[int, int] = {}
    for place, action in enumerate(plan):
        if action.op in (Op.BACKWARD, Op.WEIGHT_BACKWARD):
            last[action.stage] = end[action.stage] = place
        elif action.op is Op.SEND_GRADIENT:
            end[action.stage] = place
    line: list[Action] = []
    for place, action in enumerate(plan):
        if last.get(action.stage) == place:
            line.append(Action(Op.ARM, action.stage))
        line.append(action)
        if place == end.get(action.stage):
            line.append(Action(Op.REDUCE, action.stage))
    for stage in sorted(set(stages) - last.keys(), reverse=True):  # stages without work
        line += [Action(Op.ARM, stage), Action(Op.REDUCE, stage)]
    return tuple(line)
