"""What a checked plan promises, held against an executor that shares no code with the check.

The executor runs plans on numbers: stage s computes y = a_s · (x_m + Σ what it is fed), and the loss is the sum of what
stages give that feed nobody. Sends block until they are received, messages have no names, and ranks take turns, so a
circle of waiting is found and not waited for.
"""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.errors import PlanError
from evenstep.pipeline import SCHEDULES, Action, Layout, Op, Plan, check


class Stuck(Exception):
    """No rank can go on."""


def factor(stage: int) -> int:
    return stage + 2


def sample(microbatch: int) -> int:
    return 3 * microbatch + 1


def reference(layout: Layout, microbatches: list[int]) -> dict[int, int]:
    """The gradients of the factors, from plain loops over the stages."""
    gradient = dict.fromkeys(range(layout.stages), 0)
    for microbatch in microbatches:
        fed, out, back = {}, {}, {}
        for stage in range(layout.stages):
            fed[stage] = sample(microbatch) + sum(out[source] for source in layout.sources(stage))
            out[stage] = factor(stage) * fed[stage]
        for stage in reversed(range(layout.stages)):
            peers = layout.destinations(stage)
            grad = sum(back[peer] for peer in peers) if peers else 1
            back[stage] = grad * factor(stage)
            gradient[stage] += grad * fed[stage]
    return gradient


class Rank:
    """One rank in the middle of its plan."""

    def __init__(self, number: int, plan: Plan, layout: Layout) -> None:
        self.number, self.plan, self.layout, self.place = number, plan, layout, 0
        self.fed: dict[tuple[int, int], int] = {}
        self.out: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}
        self.grad: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[Op, int, int, int], int] = {}
        self.gradient: dict[int, int] = defaultdict(int)
        self.reduced: dict[int, int] = {}
        self.live = self.peak = 0

    @property
    def action(self) -> Action | None:
        return self.plan[self.place] if self.place < len(self.plan) else None

    def feed(self, op: Op, mine: dict[tuple[int, int], int], action: Action, peers: tuple[int, ...]) -> int:
        stage, k = action.stage, action.microbatch
        local = [mine[peer, k] for peer in peers if self.layout.rank_of[peer] == self.number]
        remote = [self.received[op, stage, k, p] for p in peers if self.layout.rank_of[p] != self.number]
        return sum(local) + sum(remote)

    def compute(self, action: Action) -> None:
        stage, k = unit = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            self.fed[unit] = sample(k) + self.feed(Op.RECEIVE_INPUT, self.out, action, self.layout.sources(stage))
            self.out[unit] = factor(stage) * self.fed[unit]
            self.live += 1
            self.peak = max(self.peak, self.live)
        elif action.op in (Op.BACKWARD, Op.INPUT_BACKWARD):
            peers = self.layout.destinations(stage)
            self.grad[unit] = self.feed(Op.RECEIVE_GRADIENT, self.back, action, peers) if peers else 1
            self.back[unit] = self.grad[unit] * factor(stage)
        if action.op in (Op.BACKWARD, Op.WEIGHT_BACKWARD):
            self.gradient[stage] += self.grad[unit] * self.fed[unit]
            self.live -= 1
        if action.op is Op.REDUCE:
            self.reduced[stage] = self.gradient[stage]


SENDS, RECEIVES = (Op.SEND_OUTPUT, Op.SEND_GRADIENT), (Op.RECEIVE_INPUT, Op.RECEIVE_GRADIENT)


def execute(plans: tuple[Plan, ...], layout: Layout) -> tuple[dict[int, int], list[int]]:
    """Run the plans; gives what was reduced of each stage, and each rank's peak of live activations.

    Raises:
        Stuck: the ranks wait for each other.
        KeyError: something was computed or sent before what it needs was there.
    """
    ranks = [Rank(number, plan, layout) for number, plan in enumerate(plans)]
    while any(rank.action for rank in ranks):
        moved = False
        for rank in ranks:
            action = rank.action
            if action is None or action.op in RECEIVES:
                continue
            if action.op in SENDS:
                other = ranks[layout.rank_of[action.peer]]
                taken = other.action
                if taken is None or taken.op not in RECEIVES or layout.rank_of[taken.peer] != rank.number:
                    continue
                values = rank.out if action.op is Op.SEND_OUTPUT else rank.back
                key = taken.op, taken.stage, taken.microbatch, taken.peer
                other.received[key] = values[action.stage, action.microbatch]
                other.place += 1
            else:
                rank.compute(action)
            rank.place += 1
            moved = True
        if not moved:
            raise Stuck
    return {stage: rank.reduced[stage] for rank in ranks for stage in rank.reduced}, [rank.peak for rank in ranks]


@st.composite
def cases(draw: st.DrawFn, max_microbatches: int = 7) -> tuple[str, Layout, list[int]]:
    """A schedule, one of its layouts with further edges, and global numbers of micro-batches."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    most = schedule.max_stages_per_rank or 3
    layout = schedule.layout(draw(st.integers(1, 4)), draw(st.integers(schedule.min_stages_per_rank, most)))
    stages = range(layout.stages)
    skips = [(a, b) for a in stages for b in stages if a + 1 < b]
    further = draw(st.lists(st.sampled_from(skips), unique=True, max_size=4)) if skips else []
    layout = Layout(rank_of=layout.rank_of, edges=(*layout.edges, *further))
    microbatches = draw(st.sets(st.integers(0, 30), max_size=max_microbatches))
    return schedule.name, layout, sorted(microbatches)


@given(cases())
def test_every_schedule_ends_with_the_exact_gradient_and_the_proved_peak(case: tuple[str, Layout, list[int]]) -> None:
    name, layout, microbatches = case
    plans = SCHEDULES[name].plans(layout, microbatches)
    gradients, peaks = execute(plans, layout)
    assert gradients == reference(layout, microbatches)
    assert tuple(peaks) == check(plans, layout, microbatches)


def damaged(plans: tuple[Plan, ...], layout: Layout, data: st.DataObject) -> tuple[Plan, ...]:
    rank = data.draw(st.sampled_from([rank for rank, plan in enumerate(plans) if plan]), label="rank")
    plan = list(plans[rank])
    place = data.draw(st.integers(0, len(plan) - 1), label="place")
    other = data.draw(st.integers(0, len(plan) - 1), label="other")
    match data.draw(st.sampled_from(["drop", "double", "swap", "move", "peer", "microbatch", "rank"]), label="damage"):
        case "drop":
            del plan[place]
        case "double":
            plan.insert(other, plan[place])
        case "swap":
            plan[place], plan[other] = plan[other], plan[place]
        case "move":
            plan.insert(other, plan.pop(place))
        case "peer":
            action, peer = plan[place], data.draw(st.integers(0, layout.stages - 1))
            plan[place] = Action(action.op, action.stage, action.microbatch, peer if action.peer >= 0 else -1)
        case "microbatch":
            action = plan[place]
            number = plan[other].microbatch if action.microbatch >= 0 else -1
            plan[place] = Action(action.op, action.stage, number, action.peer)
        case _:
            action = plan[place]
            plan[place] = Action(action.op, (action.stage + 1) % layout.stages, action.microbatch, action.peer)
    return (*plans[:rank], tuple(plan), *plans[rank + 1 :])


@settings(max_examples=150)
@given(cases(max_microbatches=4), st.data())
def test_a_damaged_plan_is_refused_or_still_exact(case: tuple[str, Layout, list[int]], data: st.DataObject) -> None:
    name, layout, microbatches = case
    plans = damaged(SCHEDULES[name].plans(layout, microbatches), layout, data)
    try:
        check(plans, layout, microbatches)
    except PlanError:
        return
    assert execute(plans, layout)[0] == reference(layout, microbatches)


@given(cases(), st.data())
def test_replicas_with_other_microbatches_reduce_their_stages_in_the_same_order(
    case: tuple[str, Layout, list[int]], data: st.DataObject
) -> None:
    name, layout, microbatches = case
    others = data.draw(st.lists(st.integers(0, 30), unique=True, max_size=7).map(sorted))
    for mine, theirs in zip(
        SCHEDULES[name].plans(layout, microbatches), SCHEDULES[name].plans(layout, others), strict=True
    ):
        assert [a for a in mine if a.microbatch < 0] == [a for a in theirs if a.microbatch < 0]
