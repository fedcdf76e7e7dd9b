"""Proof, before anything runs, that the plans of all ranks are one complete update that comes to its end.

Every micro-batch runs once forward and backward through every stage, every send has its receive, reductions come last.
Sends are taken to wait for their receives, and a REDUCE for other replicas: the worst that a network may do.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import final

from evenstep.errors import PlanError
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout

_BACKWARDS = (Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)
_GIVES_WEIGHTS = (Op.BACKWARD, Op.WEIGHT_BACKWARD)
_SENDS = {Op.SEND_OUTPUT: Op.RECEIVE_INPUT, Op.SEND_GRADIENT: Op.RECEIVE_GRADIENT}
_RECEIVES = {receive: send for send, receive in _SENDS.items()}


def check(
    plans: Sequence[Plan],
    layout: Layout,
    microbatches: Collection[int],
    *,
    max_live: int | None = None,
    forward_only: bool = False,
) -> tuple[int, ...]:
    """Check that `plans` train, or evaluate, `microbatches` exactly once on all stages of `layout`.

    Args:
        plans: the actions of each rank, with communication, ARM and REDUCE, as `lower` gives them.
        microbatches: the global numbers of the micro-batches.
        max_live: the largest number of (stage, micro-batch) activations that may live on a rank at once.
        forward_only: plans for evaluation: no backward, no reduction, no activation that stays alive.

    Returns:
        For each rank the peak number of (stage, micro-batch) activations that live at once, from their forward to the
        backward that gives the gradients of weights.

    Raises:
        PlanError: an action is missing, repeated, foreign or out of order, too many activations live at once, or ranks
            would wait for each other for ever. The message names rank, place and action.

    >>> from evenstep.pipeline.lower import lower
    >>> from evenstep.pipeline.schedules import one_f_one_b
    >>> layout = Layout.chain(ranks=2)
    >>> check(lower(one_f_one_b(layout, range(4)), layout), layout, range(4))
    (2, 1)
    """
    if len(plans) != layout.ranks:
        raise PlanError(f"there must be one plan for each of the {layout.ranks} ranks, but there are {len(plans)}.")
    peaks: list[int] = []
    for rank, plan in enumerate(plans):
        one = _RankPlan(rank, plan, layout)
        one.check_complete(microbatches, forward_only=forward_only)
        peaks.append(one.walk(max_live))
    _check_order(plans, layout)
    _check_end(plans, layout)
    return tuple(peaks)


@final
class _RankPlan:
    def __init__(self, rank: int, plan: Plan, layout: Layout) -> None:
        self._rank = rank
        self._plan = plan
        self._layout = layout
        self._owner = layout.rank_of
        self._stages = layout.stages_of(rank)
        self._counts = Counter(plan)

    def check_complete(self, microbatches: Collection[int], *, forward_only: bool) -> None:
        wanted = set(self._wanted(microbatches, forward_only=forward_only))
        for action in self._plan:
            if action not in wanted:
                raise PlanError(
                    f"rank {self._rank} must not do {action}: its stages are {list(self._stages)}, and this update has "
                    f"{len(microbatches)} micro-batches and no such action."
                )
            if self._counts[action] > 1:
                raise PlanError(f"rank {self._rank} must do {action} once, but does it {self._counts[action]} times.")
        missing = wanted - self._counts.keys()
        if missing:
            first = min(missing, key=lambda action: (action.microbatch, action.stage, action.op.value, action.peer))
            raise PlanError(
                f"rank {self._rank} must do {first} ({first.op.name} of stage {first.stage}), but its plan lacks it "
                f"and {len(missing) - 1} others."
            )

    def walk(self, max_live: int | None) -> int:
        done: set[Action] = set()
        live = 0
        peak = 0
        total = Counter(action.stage for action in self._plan if action.op in _BACKWARDS)
        left = total.copy()
        for place, action in enumerate(self._plan):
            here = f"rank {self._rank}, action {place}, {action}"
            to_come = f"{left[action.stage]} of the backwards of stage {action.stage} are still to come"
            for earlier in self._before(action):
                if earlier not in done:
                    raise PlanError(f"{here}: {earlier} must come before it.")
            if action.op is Op.ARM and left[action.stage] != min(1, total[action.stage]):
                raise PlanError(f"{here}: ARM must stand right before the last backward, but {to_come}.")
            if action.op is Op.REDUCE and left[action.stage] > 0:
                raise PlanError(f"{here}: REDUCE must come after all backwards, but {to_come}.")
            live += (action.op is Op.FORWARD and left[action.stage] > 0) - (action.op in _GIVES_WEIGHTS)
            peak = max(peak, live)
            if max_live is not None and live > max_live:
                raise PlanError(
                    f"{here}: at most {max_live} activations may live at once, but these are {live}; take a pipeline "
                    f"schedule that keeps fewer."
                )
            left[action.stage] -= action.op in _BACKWARDS
            done.add(action)
        return peak

    def _wanted(self, microbatches: Collection[int], *, forward_only: bool) -> Iterator[Action]:
        for stage in self._stages:
            if not forward_only:
                yield Action(Op.ARM, stage)
                yield Action(Op.REDUCE, stage)
            sources = [peer for peer in self._layout.sources(stage) if self._owner[peer] != self._rank]
            destinations = [peer for peer in self._layout.destinations(stage) if self._owner[peer] != self._rank]
            for microbatch in microbatches:
                yield Action(Op.FORWARD, stage, microbatch)
                yield from (Action(Op.RECEIVE_INPUT, stage, microbatch, peer) for peer in sources)
                yield from (Action(Op.SEND_OUTPUT, stage, microbatch, peer) for peer in destinations)
                if forward_only:
                    continue
                backward = self._backward(stage, microbatch)
                yield backward
                if backward.op is Op.INPUT_BACKWARD:
                    yield Action(Op.WEIGHT_BACKWARD, stage, microbatch)
                yield from (Action(Op.RECEIVE_GRADIENT, stage, microbatch, peer) for peer in destinations)
                yield from (Action(Op.SEND_GRADIENT, stage, microbatch, peer) for peer in sources)

    def _backward(self, stage: int, microbatch: int) -> Action:
        halves = (Action(Op.INPUT_BACKWARD, stage, microbatch), Action(Op.WEIGHT_BACKWARD, stage, microbatch))
        split = any(half in self._counts for half in halves)
        return halves[0] if split else Action(Op.BACKWARD, stage, microbatch)

    def _before(self, action: Action) -> Iterator[Action]:
        stage, microbatch = action.stage, action.microbatch
        match action.op:
            case Op.FORWARD:
                for peer in self._layout.sources(stage):
                    if self._owner[peer] == self._rank:
                        yield Action(Op.FORWARD, peer, microbatch)
                    else:
                        yield Action(Op.RECEIVE_INPUT, stage, microbatch, peer)
            case Op.BACKWARD | Op.INPUT_BACKWARD:
                yield Action(Op.FORWARD, stage, microbatch)
                for peer in self._layout.destinations(stage):
                    if self._owner[peer] == self._rank:
                        yield self._backward(peer, microbatch)
                    else:
                        yield Action(Op.RECEIVE_GRADIENT, stage, microbatch, peer)
            case Op.WEIGHT_BACKWARD:
                yield Action(Op.INPUT_BACKWARD, stage, microbatch)
            case Op.SEND_OUTPUT:
                yield Action(Op.FORWARD, stage, microbatch)
            case Op.SEND_GRADIENT:
                yield self._backward(stage, microbatch)
            case Op.REDUCE:
                yield Action(Op.ARM, stage)
            case _:
                pass


def _other_end(action: Action) -> Action:
    op = _SENDS.get(action.op) or _RECEIVES[action.op]
    return Action(op, action.peer, action.microbatch, action.stage)


def _check_order(plans: Sequence[Plan], layout: Layout) -> None:
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for action in plan:
            if action.op in _SENDS:
                sends[rank, layout.rank_of[action.peer]].append(action)
            elif action.op in _RECEIVES:
                receives[layout.rank_of[action.peer], rank].append(action)
    for pair in sorted(sends.keys() | receives.keys()):
        source, destination = pair
        for place, (send, receive) in enumerate(zip_longest(sends[pair], receives[pair])):
            if send is None or receive is None or _other_end(send) != receive:
                raise PlanError(
                    f"message {place} from rank {source} to rank {destination} must be the same on both ends, but is "
                    f"sent as {send or 'nothing'} and received as {receive or 'nothing'}."
                )


def _check_end(plans: Sequence[Plan], layout: Layout) -> None:
    places = _run(plans, layout)
    stuck = [rank for rank, plan in enumerate(plans) if places[rank] < len(plan)]
    if stuck:
        waits = ", ".join(f"rank {rank} at action {places[rank]}, {plans[rank][places[rank]]}" for rank in stuck[:8])
        raise PlanError(
            f"ranks would wait for each other for ever: {waits}; put sends and receives into one order in time on "
            f"which all ranks agree, and reduce the later stages before the earlier ones."
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
            elif action.op in _SENDS or action.op in _RECEIVES:
                peer = layout.rank_of[action.peer]
                if places[peer] == len(plans[peer]) or plans[peer][places[peer]] != _other_end(action):
                    break
                places[peer] += 1
                ready.append(peer)
            places[rank] += 1
    return places
