"""Proves that what ranks send and receive meets, in one order on both ends, and that waiting for it comes to an end.

Sends are taken to wait for their receives, and a REDUCE for other replicas: the worst that a network may do.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from evenstep.errors import PlanError
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout

SENDS = {Op.SEND_OUTPUT: Op.RECEIVE_INPUT, Op.SEND_GRADIENT: Op.RECEIVE_GRADIENT}
RECEIVES = {receive: send for send, receive in SENDS.items()}


def other_end(action: Action) -> Action:
    """The receive of a send, the send of a receive.

    >>> str(other_end(Action(Op.SEND_OUTPUT, 0, 3, 1)))
    '1RI3:0'
    """
    op = SENDS.get(action.op) or RECEIVES[action.op]
    return Action(op, action.peer, action.microbatch, action.stage)


def check_meetings(plans: Sequence[Plan], layout: Layout) -> None:
    """Check that every send meets its receive, and that no ranks wait for each other for ever."""
    _check_order(plans, layout)
    places = _run(plans, layout)
    stuck = [rank for rank, plan in enumerate(plans) if places[rank] < len(plan)]
    if stuck:
        waits = ", ".join(f"rank {rank} at action {places[rank]}, {plans[rank][places[rank]]}" for rank in stuck[:8])
        raise PlanError(
            f"ranks would wait for each other for ever: {waits}; put sends and receives into one order in time on "
            f"which all ranks agree, and reduce the later stages before the earlier ones."
        )


def _check_order(plans: Sequence[Plan], layout: Layout) -> None:
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for action in plan:
            if action.op in SENDS:
                sends[rank, layout.rank_of[action.peer]].append(action)
            elif action.op in RECEIVES:
                receives[layout.rank_of[action.peer], rank].append(action)
    for pair in sorted(sends.keys() | receives.keys()):
        source, destination = pair
        for place, (send, receive) in enumerate(zip_longest(sends[pair], receives[pair])):
            if send is None or receive is None or other_end(send) != receive:
                raise PlanError(
                    f"message {place} from rank {source} to rank {destination} must be the same on both ends, but is "
                    f"sent as {send or 'nothing'} and received as {receive or 'nothing'}."
                )


def _run(plans: Sequence[Plan], layout: Layout) -> list[int]:
    places = [0] * len(plans)
    next_reduced = layout.stages - 1
    ready = list(range(len(plans)))
    while ready:
        rank = ready.pop()
        plan = plans[rank]
        while places[rank] < len(plan):
            action = plan[places[rank]]
            if action.op is Op.REDUCE:
                if action.stage != next_reduced:
                    break
                next_reduced -= 1
                if next_reduced >= 0:
                    ready.append(layout.rank_of[next_reduced])
            elif action.op in SENDS or action.op in RECEIVES:
                peer = layout.rank_of[action.peer]
                if places[peer] == len(plans[peer]) or plans[peer][places[peer]] != other_end(action):
                    break
                places[peer] += 1
                ready.append(peer)
            places[rank] += 1
    return places
