"""Orders for V-shaped layouts, woven from one repeating block per rank, whose length decides how much memory is used.

A micro-batch goes down the ranks, up again, and its gradients down and up. If each leg takes so many slots from one
rank to the next, and every six slots another micro-batch begins, then each rank repeats six actions for ever, and how
long an activation lives follows from the legs alone. Idle time at both ends is filled afterwards, without keeping more
alive. It is the construction of controllable-memory pipelines (Qi et al. 2024, arXiv:2405.15362); the filling is our
own.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.schedules.demands import check_v

PERIOD = 6  # forward, input-backward and weight-backward of two stages
WINDOW = 24  # how far ahead in its order a rank looks for something to do
Legs = tuple[int, int, int, int]
Block = tuple[tuple[int, Op, int], ...]  # slot, what, and whether on the way down (0) or up (1)
_FAR = float("inf")


def in_blocks(name: str, layout: Layout, microbatches: Sequence[int], legs: Legs) -> tuple[Plan, ...]:
    """What each rank computes.

    Args:
        name: of the pipeline schedule, for errors.
        layout: of the stages, which go through the ranks and back.
        microbatches: their global numbers, in ascending order.
        legs: slots from one rank to the next: outputs down and up, gradients down and up.

    Raises:
        PlanError: the layout is no V.
    """
    check_v(name, layout)
    ranks, count = layout.ranks, len(microbatches)
    orders: list[list[tuple[Op, int, int]]] = []
    for depth, block in enumerate(blocks(ranks, legs)):
        stages = depth, 2 * ranks - 1 - depth
        slots = sorted(
            (slot + PERIOD * k, op.value, stages[context], k) for slot, op, context in block for k in range(count)
        )
        orders.append([(Op(op), stage, k) for _, op, stage, k in slots])
    filled = _fill(orders, layout.stages, max_live(ranks, legs))
    by_rank: list[Plan] = [()] * ranks
    for depth, order in enumerate(filled):
        _end_with_the_earlier_stage(order, count)
        by_rank[layout.rank_of[depth]] = tuple(Action(op, stage, microbatches[k]) for op, stage, k in order)
    return tuple(by_rank)


@lru_cache(maxsize=64)
def blocks(ranks: int, legs: Legs) -> tuple[Block, ...]:
    """The repeating six actions of each rank: those that keep the fewest activations and then wait the least.

    Args:
        legs: slots from one rank to the next; see `in_blocks`.
    """
    found: list[tuple[int, int, int, tuple[Block, ...]]] = []
    for waits in product(range(1, PERIOD + 1), repeat=3):
        whole: list[Block] = []
        while len(whole) < ranks and (block := _block(ranks, len(whole), legs, waits)) is not None:
            whole.append(block)
        if len(whole) == ranks:
            found.append((max(map(_peak, whole)), sum(waits), -waits[0], tuple(whole)))
    assert found, f"legs {legs} do not fit {ranks} ranks"
    return min(found, key=lambda candidate: candidate[:3])[3]


@lru_cache(maxsize=64)
def max_live(ranks: int, legs: Legs) -> int:
    """The most (stage, micro-batch) activations that any rank keeps.

    >>> max_live(4, (2, 1, 2, 1))  # V-Half: (P+2)//2 micro-batches of two stages each
    6
    """
    return max(map(_peak, blocks(ranks, legs)))


def _block(ranks: int, depth: int, legs: Legs, waits: tuple[int, ...]) -> Block | None:
    """One rank's block when so much is waited at each turn, or None if two actions would fall into one slot."""
    above, below = depth, ranks - 1 - depth
    down = legs[0] * above
    up = legs[0] * (ranks - 1) + waits[0] + legs[1] * below
    back_down = (legs[0] + legs[1]) * (ranks - 1) + waits[0] + waits[1] + legs[2] * above
    back_up = (legs[0] + legs[1] + legs[2]) * (ranks - 1) + sum(waits) + legs[3] * below
    taken = [slot % PERIOD for slot in (down, up, back_down, back_up)]
    free = sorted(set(range(PERIOD)) - set(taken))
    if len(free) != 2:
        return None
    weights = min(
        ([_next(back_down, residues[0]), _next(back_up, residues[1])] for residues in (free, free[::-1])), key=sum
    )
    return (
        (down, Op.FORWARD, 0),
        (up, Op.FORWARD, 1),
        (back_down, Op.INPUT_BACKWARD, 1),
        (weights[0], Op.WEIGHT_BACKWARD, 1),
        (back_up, Op.INPUT_BACKWARD, 0),
        (weights[1], Op.WEIGHT_BACKWARD, 0),
    )


def _next(slot: int, residue: int) -> int:
    """The first slot after `slot` with that residue."""
    return slot + 1 + (residue - slot - 1) % PERIOD


def _peak(block: Block) -> int:
    """How many activations live at once when the block repeats for ever."""
    return max(
        sum((now - slot) // PERIOD * ((op is Op.FORWARD) - (op is Op.WEIGHT_BACKWARD)) for slot, op, _ in block)
        for now in range(PERIOD)
    )


def _fill(orders: list[list[tuple[Op, int, int]]], stages: int, most: int) -> list[list[tuple[Op, int, int]]]:
    """Let each rank do what it can meanwhile, instead of waiting for the next action of its order.

    An action is drawn forward only if no more than `most` activations then ever live, all others following in their
    order; so the order that is left always can be run to its end. Weight-backwards are what idle time is filled with.
    """
    orders = [list(order) for order in orders]
    filled: list[list[tuple[Op, int, int]]] = [[] for _ in orders]
    live = [0] * len(orders)
    made: dict[tuple[Op, int, int], int] = {}
    now = 0
    # who can do nothing waits for what a neighbour makes, so nobody else is asked again
    awake = {*range(len(orders))}
    while awake:
        chosen = [(rank, _choose(orders[rank], live[rank], made, now, stages, most)) for rank in awake]
        now += 1
        awake = set[int]()
        for rank, place in chosen:
            if place is not None:
                action = orders[rank].pop(place)
                filled[rank].append(action)
                live[rank] += (action[0] is Op.FORWARD) - (action[0] is Op.WEIGHT_BACKWARD)
                made[action] = now
                awake |= {max(rank - 1, 0), rank, min(rank + 1, len(orders) - 1)}
    return filled


def _end_with_the_earlier_stage(order: list[tuple[Op, int, int]], count: int) -> None:
    """Let the later stage have its last weight-backward first, as stages are reduced in that order on all replicas."""
    last = [place for place, action in enumerate(order) if (action[0], action[2]) == (Op.WEIGHT_BACKWARD, count - 1)]
    if last and order[last[0]][1] < order[last[1]][1]:
        order[last[0]], order[last[1]] = order[last[1]], order[last[0]]


def _choose(
    order: list[tuple[Op, int, int]],
    live: int,
    made: dict[tuple[Op, int, int], int],
    now: int,
    stages: int,
    most: int,
) -> int | None:
    """The place of the action to do now: the first that can be done, but a weight-backward only if nothing else can."""
    weight: int | None = None
    passed: set[tuple[Op, int]] = set()
    running = peak = live
    for place, (op, stage, microbatch) in enumerate(order[:WINDOW]):
        if (op, stage) not in passed and _can(op, stage, microbatch, made, now, stages):
            if op is Op.WEIGHT_BACKWARD:
                weight = place if weight is None else weight
            elif op is Op.INPUT_BACKWARD or peak < most:
                return place
        passed.add((op, stage))
        running += (op is Op.FORWARD) - (op is Op.WEIGHT_BACKWARD)
        peak = max(peak, running)
    return weight


def _can(op: Op, stage: int, microbatch: int, made: dict[tuple[Op, int, int], int], now: int, stages: int) -> bool:
    if op is Op.FORWARD:
        return stage == 0 or made.get((op, stage - 1, microbatch), _FAR) <= now
    if op is Op.WEIGHT_BACKWARD:
        return made.get((Op.INPUT_BACKWARD, stage, microbatch), _FAR) <= now
    done = made.get((Op.FORWARD, stage, microbatch), _FAR) <= now
    return done and (stage == stages - 1 or made.get((op, stage + 1, microbatch), _FAR) <= now)
