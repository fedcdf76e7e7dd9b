"""Proof, before anything runs, that the plans of all ranks are one complete update that comes to its end.

Plans are walked together. A send waits for its receive, and a REDUCE for other replicas: the worst that a network may
do.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import final

from evenstep.errors import PlanError
from evenstep.pipeline.action import Action, Layout, Op, Plan

_BACKWARDS = (Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)
_GIVES_WEIGHTS = (Op.BACKWARD, Op.WEIGHT_BACKWARD)
_OTHER_END = {
    Op.SEND_OUTPUT: Op.RECEIVE_INPUT,
    Op.RECEIVE_INPUT: Op.SEND_OUTPUT,
    Op.SEND_GRADIENT: Op.RECEIVE_GRADIENT,
    Op.RECEIVE_GRADIENT: Op.SEND_GRADIENT,
}


def check(
    plans: Sequence[Plan], layout: Layout, microbatches: Collection[int], *, forward_only: bool = False
) -> tuple[int, ...]:
    """Check that `plans` train, or evaluate, `microbatches` exactly once on all stages of `layout`.

    Args:
        plans: the actions of each rank, with communication, ARM and REDUCE, as `lower` gives them.
        forward_only: plans for evaluation.

    Returns:
        For each rank the peak number of (stage, micro-batch) activations that live at once.

    Raises:
        PlanError: an action is missing, repeated, foreign or out of order, or ranks would wait for each other for ever.
    """
    if len(plans) != layout.ranks:
        raise PlanError(f"there must be one plan for each of the {layout.ranks} ranks, but there are {len(plans)}.")
    walks = [_Walk(rank, plan, layout) for rank, plan in enumerate(plans)]
    for walk in walks:
        walk.check_complete(microbatches, forward_only=forward_only)
    _walk_together(walks, layout)
    return tuple(walk.peak for walk in walks)


@final
class _Walk:
    def __init__(self, rank: int, plan: Plan, layout: Layout) -> None:
        self.rank = rank
        self.plan = plan
        self.place = 0
        self.peak = 0
        self._layout = layout
        self._owner = layout.rank_of
        self._counts = Counter(plan)
        self._done: set[Action] = set()
        self._live = 0
        self._left = Counter(action.stage for action in plan if action.op in _BACKWARDS)
        self._trains = set(self._left)

    @property
    def action(self) -> Action | None:
        return self.plan[self.place] if self.place < len(self.plan) else None

    def check_complete(self, microbatches: Collection[int], *, forward_only: bool) -> None:
        wanted = set(self._wanted(microbatches, forward_only=forward_only))
        wrong = [action for action, count in self._counts.items() if action not in wanted or count > 1]
        missing = [str(action) for action in wanted - self._counts.keys()]
        if wrong or missing:
            found = f"does {wrong[0]} {self._counts[wrong[0]]} times" if wrong else f"lacks {min(missing)}"
            raise PlanError(
                f"rank {self.rank} must do each action of its stages once for each of the {len(microbatches)} "
                f"micro-batches, but its plan {found}."
            )

    def step(self) -> None:
        action = self.plan[self.place]
        left = self._left[action.stage]
        is_early = any(earlier not in self._done for earlier in self._before(action))
        if action.op is Op.ARM:
            is_early = left != (action.stage in self._trains)
        if is_early or (action.op is Op.REDUCE and left > 0):
            raise PlanError(f"rank {self.rank}, action {self.place}, {action}: what it needs must come before it.")
        self._live += (action.op is Op.FORWARD and left > 0) - (action.op in _GIVES_WEIGHTS)
        self.peak = max(self.peak, self._live)
        self._left[action.stage] -= action.op in _BACKWARDS
        self._done.add(action)
        self.place += 1

    def _wanted(self, microbatches: Collection[int], *, forward_only: bool) -> Iterator[Action]:
        for stage in self._layout.stages_of(self.rank):
            if not forward_only:
                yield Action(Op.ARM, stage)
                yield Action(Op.REDUCE, stage)
            sources = [peer for peer in self._layout.sources(stage) if self._owner[peer] != self.rank]
            destinations = [peer for peer in self._layout.destinations(stage) if self._owner[peer] != self.rank]
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
                    if self._owner[peer] == self.rank:
                        yield Action(Op.FORWARD, peer, microbatch)
                    else:
                        yield Action(Op.RECEIVE_INPUT, stage, microbatch, peer)
            case Op.BACKWARD | Op.INPUT_BACKWARD:
                yield Action(Op.FORWARD, stage, microbatch)
                for peer in self._layout.destinations(stage):
                    if self._owner[peer] == self.rank:
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


def _walk_together(walks: Sequence[_Walk], layout: Layout) -> None:
    next_reduced = layout.stages - 1
    ready = [*walks]
    while ready:
        walk = ready.pop()
        while (action := walk.action) is not None:
            if action.op is Op.REDUCE:
                if action.stage != next_reduced:
                    break
                next_reduced -= 1
                if next_reduced >= 0:
                    ready.append(walks[layout.rank_of[next_reduced]])
            elif action.op in _OTHER_END:
                peer = walks[layout.rank_of[action.peer]]
                if peer.action != Action(_OTHER_END[action.op], action.peer, action.microbatch, action.stage):
                    break
                peer.step()
                ready.append(peer)
            walk.step()
    stuck = [f"rank {walk.rank} at action {walk.place}, {walk.action}" for walk in walks if walk.action is not None]
    if stuck:
        raise PlanError(
            f"ranks would wait for each other for ever: {', '.join(stuck[:8])}; put sends and receives into one order "
            f"on which all ranks agree, and reduce the later stages before the earlier ones."
        )
