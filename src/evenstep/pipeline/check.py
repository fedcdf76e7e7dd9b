"""Proof, before anything runs, that the plans of all ranks are one complete update that comes to its end.

Plans are walked together. A send waits for its receive, and a REDUCE for other replicas: the worst that a network may
do.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import product
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
Needs = dict[Action, list[Action]]


def check(plans: Sequence[Plan], layout: Layout, microbatches: Collection[int]) -> tuple[int, ...]:
    """Check that `plans` train `microbatches` exactly once on all stages of `layout`.

    Gives the peak number of (stage, micro-batch) activations that live at once on each rank. PlanError if an action is
    missing, repeated, foreign or out of order, or if ranks would wait for each other for ever.

    Args:
        plans: the actions of each rank, with communication, ARM and REDUCE, as `lower` gives them.
    """
    if len(plans) != layout.ranks:
        raise PlanError(f"there must be one plan for each of the {layout.ranks} ranks, but there are {len(plans)}.")
    walks: list[_Walk] = []
    for rank, plan in enumerate(plans):
        needs = _needs(rank, plan, layout, microbatches)
        counts = Counter(plan)
        wrong = [action for action, count in counts.items() if action not in needs or count > 1]
        missing = [str(action) for action in needs if action not in counts]
        if wrong or missing:
            found = f"does {wrong[0]} {counts[wrong[0]]} times" if wrong else f"lacks {min(missing)}"
            raise PlanError(
                f"rank {rank} must do each action of its stages once for each of the {len(microbatches)} "
                f"micro-batches, but its plan {found}."
            )
        walks.append(_Walk(rank, plan, needs))
    _walk_together(walks, layout)
    return tuple(walk.peak for walk in walks)


def _needs(rank: int, plan: Plan, layout: Layout, microbatches: Collection[int]) -> Needs:
    """All actions that a plan must have, each with those that must come before it on the same rank."""
    split = {(action.stage, action.microbatch) for action in plan if action.op in _BACKWARDS[1:]}

    def backward(stage: int, k: int) -> Action:
        return Action(Op.INPUT_BACKWARD if (stage, k) in split else Op.BACKWARD, stage, k)

    needs: Needs = {}
    own = layout.stages_of(rank)
    for stage, k in product(own, microbatches):
        sources, destinations = layout.sources(stage), layout.destinations(stage)
        forward = Action(Op.FORWARD, stage, k)
        needs[forward] = [
            Action(Op.FORWARD, peer, k) if peer in own else Action(Op.RECEIVE_INPUT, stage, k, peer) for peer in sources
        ]
        needs |= {Action(Op.SEND_OUTPUT, stage, k, peer): [forward] for peer in destinations if peer not in own}
        back = backward(stage, k)
        needs[back] = [forward] + [
            backward(peer, k) if peer in own else Action(Op.RECEIVE_GRADIENT, stage, k, peer) for peer in destinations
        ]
        needs |= {Action(Op.SEND_GRADIENT, stage, k, peer): [back] for peer in sources if peer not in own}
        if back.op is Op.INPUT_BACKWARD:
            needs[Action(Op.WEIGHT_BACKWARD, stage, k)] = [back]
    needs |= {one: [] for some in [*needs.values()] for one in some if one.op in _OTHER_END}
    for stage in own:
        needs |= {Action(Op.ARM, stage): [], Action(Op.REDUCE, stage): [Action(Op.ARM, stage)]}
    return needs


@final
class _Walk:
    def __init__(self, rank: int, plan: Plan, needs: Needs) -> None:
        self.rank, self.plan = rank, plan
        self.place = self.peak = 0
        self._needs = needs
        self._done: set[Action] = set()
        self._live = 0
        self._left = Counter(action.stage for action in plan if action.op in _BACKWARDS)
        self._trains = set(self._left)

    @property
    def action(self) -> Action | None:
        return self.plan[self.place] if self.place < len(self.plan) else None

    def step(self) -> None:
        action = self.plan[self.place]
        left = self._left[action.stage]
        is_early = any(needed not in self._done for needed in self._needs[action])
        if action.op is Op.ARM:
            is_early = left != (action.stage in self._trains)
        if is_early or (action.op is Op.REDUCE and left > 0):
            raise PlanError(f"rank {self.rank}, action {self.place}, {action}: its needs must come before it.")
        self._live += (action.op is Op.FORWARD) - (action.op in _GIVES_WEIGHTS)
        self.peak = max(self.peak, self._live)
        self._left[action.stage] -= action.op in _BACKWARDS
        self._done.add(action)
        self.place += 1


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
