"""Proves, before anything runs, that the plans of all ranks together are one complete update that comes to its end.

Every micro-batch runs once forward and backward through every stage, sends meet receives, reductions come last.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import final

from evenstep.errors import PlanError
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.meetings import check_meetings

_BACKWARDS = (Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)
_GIVES_WEIGHTS = (Op.BACKWARD, Op.WEIGHT_BACKWARD)


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
        forward_only: whether the plans are for evaluation: no backward, nothing reduced, nothing kept alive.

    Returns:
        For each rank the peak number of (stage, micro-batch) activations that live at once, from their forward to the
        backward that gives the gradients of weights.

    Raises:
        PlanError: something is missing, repeated, foreign or out of order, too much lives at once, or the ranks would
            wait for each other for ever; the message names rank, place and action, and what must be.

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
    check_meetings(plans, layout)
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
                raise PlanError(f"rank {self._rank} must not do {action}: {self._why_foreign(action, microbatches)}.")
            if self._counts[action] > 1:
                raise PlanError(
                    f"rank {self._rank} must do {action} once, but its plan holds it {self._counts[action]} times."
                )
        missing = wanted - self._counts.keys()
        if missing:
            first = min(missing, key=lambda action: (action.microbatch, action.stage, action.op.value, action.peer))
            raise PlanError(
                f"rank {self._rank} must do {first} ({first.op.name} of stage {first.stage}), but its plan lacks it"
                + (f", and {len(missing) - 1} actions more." if len(missing) > 1 else ".")
            )

    def walk(self, max_live: int | None) -> int:
        done: set[Action] = set()
        live = peak = 0
        total = Counter(action.stage for action in self._plan if action.op in _BACKWARDS)
        left = total.copy()
        for place, action in enumerate(self._plan):
            for earlier in self._before(action):
                if earlier not in done:
                    raise PlanError(f"{self._here(place)}: {earlier} must come before it, but {self._where(earlier)}.")
            if action.op is Op.ARM and left[action.stage] != min(1, total[action.stage]):
                raise PlanError(
                    f"{self._here(place)}: ARM must stand right before the last backward of stage {action.stage}, but "
                    f"{left[action.stage]} of its backwards are still to come."
                )
            if action.op is Op.REDUCE and left[action.stage] > 0:
                raise PlanError(
                    f"{self._here(place)}: REDUCE must come after all backwards of stage {action.stage}, but "
                    f"{left[action.stage]} of them are still to come."
                )
            live += (action.op is Op.FORWARD and left[action.stage] > 0) - (action.op in _GIVES_WEIGHTS)
            peak = max(peak, live)
            if max_live is not None and live > max_live:
                raise PlanError(
                    f"{self._here(place)}: at most {max_live} activations of (stage, micro-batch) may live at once, "
                    f"but these are {live}; run a backward before it, or take a pipeline schedule that keeps fewer."
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
                    local = self._owner[peer] == self._rank
                    yield (
                        Action(Op.FORWARD, peer, microbatch)
                        if local
                        else Action(Op.RECEIVE_INPUT, stage, microbatch, peer)
                    )
            case Op.BACKWARD | Op.INPUT_BACKWARD:
                yield Action(Op.FORWARD, stage, microbatch)
                for peer in self._layout.destinations(stage):
                    local = self._owner[peer] == self._rank
                    yield (
                        self._backward(peer, microbatch)
                        if local
                        else Action(Op.RECEIVE_GRADIENT, stage, microbatch, peer)
                    )
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

    def _here(self, place: int) -> str:
        return f"rank {self._rank}, action {place}, {self._plan[place]}"

    def _where(self, action: Action) -> str:
        return f"it comes later, as action {self._plan.index(action)}" if action in self._counts else "it never comes"

    def _why_foreign(self, action: Action, microbatches: Collection[int]) -> str:
        stage, microbatch = action.stage, action.microbatch
        if stage not in self._stages:
            return f"it owns the stages {list(self._stages)}"
        if action.microbatch >= 0 and microbatch not in microbatches:
            return f"{microbatch} is not among the {len(microbatches)} micro-batches of this update"
        if action.op is Op.BACKWARD:
            return "its plan has a backward of inputs or weights for the same stage and micro-batch"
        if action.op in _BACKWARDS or action.peer < 0:
            return "this update has none"
        return f"between the stages {stage} and {action.peer} nothing is to be sent in that direction"
