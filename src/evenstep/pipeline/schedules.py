"""Pipeline schedules: pure functions that give the order of computations, and the table of them.

Ranks P, micro-batches M, stages per rank v; times f, i, w, b = i + w: forward, input, weight and whole backward.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, final

from evenstep.errors import PlanError
from evenstep.pipeline.action import Action, Layout, Op, Plan
from evenstep.pipeline.check import check
from evenstep.pipeline.lower import lower

T = TypeVar("T")
Order = Callable[[Layout, Sequence[int]], tuple[Plan, ...]]
"""Computations of each rank, from the stages and the global numbers of the micro-batches; may raise PlanError."""


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule.

    Args:
        max_stages_per_rank: most stages per rank; None for any number.
        v_shaped: True if stages go through the ranks and back instead of round and round.
        splits_backward: True if gradients of inputs and of weights are computed apart.
        rank_of: rank of each stage, for an order with one placement only.
    """

    name: str
    order: Order
    summary: str
    min_stages_per_rank: int = 1
    max_stages_per_rank: int | None = 1
    v_shaped: bool = False
    splits_backward: bool = False
    rank_of: tuple[int, ...] | None = None

    def layout(self, ranks: int, stages_per_rank: int | None = None) -> Layout:
        """The chain of stages, as few per rank as possible by default; PlanError for a wrong number."""
        few, many = self.min_stages_per_rank, self.max_stages_per_rank
        stages = few if stages_per_rank is None else stages_per_rank
        if stages < few or (many is not None and stages > many):
            allowed = f"at least {few}" if many is None else str(few) if few == many else f"{few} to {many}"
            raise PlanError(f"{self.name} is for {allowed} stages per rank, but `stages_per_rank` is {stages}.")
        if self.rank_of is not None:
            layout = Layout(rank_of=self.rank_of, edges=Layout.chain(ranks=len(self.rank_of)).edges)
            if layout.ranks != ranks:
                raise PlanError(f"{self.name} is written for {layout.ranks} ranks, but there are {ranks}.")
            return layout
        return Layout.chain(ranks=ranks, stages_per_rank=stages, v_shaped=self.v_shaped)

    def plans(self, layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
        """The complete, checked plans of all ranks for one update; PlanError if the order is no complete update."""
        plans = lower(self.order(layout, microbatches), layout)
        check(plans, layout, microbatches)
        return plans


def _of_each_rank(order: Callable[[Layout, int, Sequence[int]], Sequence[Action]]) -> Order:
    """An order of all ranks from a function that gives that of one, by its number."""

    @wraps(order)
    def orders(layout: Layout, microbatches: Sequence[int]) -> tuple[Plan, ...]:
        return tuple(tuple(order(layout, rank, microbatches)) for rank in range(layout.ranks))

    return orders


@_of_each_rank
def sequential(layout: Layout, rank: int, microbatches: Sequence[int]) -> Sequence[Action]:
    """Each micro-batch through all stages forward, then at once backward, before the next begins.

    Over several ranks nothing overlaps; with one stage it is ordinary training.
    """
    stages = layout.stages_of(rank)
    steps = [(Op.FORWARD, stage) for stage in stages] + [(Op.BACKWARD, stage) for stage in reversed(stages)]
    return [Action(op, stage, microbatch) for microbatch in microbatches for op, stage in steps]


@_of_each_rank
def breadth_first(layout: Layout, rank: int, microbatches: Sequence[int]) -> Sequence[Action]:
    """All micro-batches through a rank's first stage, then all through its next; backward the other way round.

    The bubble is (P-1)(f+b)/v, with all M micro-batches alive; each stage's weights are needed in one stretch forward
    and one backward, which suits sharded parameters. Breadth-first pipeline parallelism (Lamy-Poirier 2022,
    arXiv:2211.05953). On one stage per rank it is GPipe (Huang et al. 2019, arXiv:1811.06965).
    """
    stages = layout.stages_of(rank)
    forwards = [Action(Op.FORWARD, stage, each) for stage in stages for each in microbatches]
    backwards = [Action(Op.BACKWARD, stage, each) for stage in reversed(stages) for each in microbatches]
    return forwards + backwards


@_of_each_rank
def one_f_one_b(layout: Layout, rank: int, microbatches: Sequence[int]) -> Sequence[Action]:
    """Forwards, then forwards and backwards in turns, on one stage per rank.

    Stage s of P runs P-1-s forwards ahead. The bubble is GPipe's, (P-1)(f+b), but only min(M, P-s) activations live at
    once. PipeDream-Flush (Narayanan et al. 2021, arXiv:2104.04473).

    >>> print(*one_f_one_b(Layout.chain(ranks=2), [0, 1, 2])[0])
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    forwards = [Action(Op.FORWARD, rank, microbatch) for microbatch in microbatches]
    backwards = [Action(Op.BACKWARD, rank, microbatch) for microbatch in microbatches]
    return _in_turns(forwards, backwards, ahead=layout.ranks - 1 - rank)


@_of_each_rank
def interleaved(layout: Layout, rank: int, microbatches: Sequence[int]) -> Sequence[Action]:
    """1F1B in groups of P micro-batches, on v stages per rank that go round the ranks.

    The bubble is a v-th of GPipe's, (P-1)(f+b)/v, with v times as many messages; the rank of stage s<P keeps
    ((v-1)P + 2(P-1-s) + 1)/v micro-batches of its share alive. Where the ranks do not divide the micro-batches, the
    order is that of the next multiple with the missing ones left out. (Narayanan et al. 2021, arXiv:2104.04473)
    """
    ranks, stages, count = layout.ranks, layout.stages_of(rank), len(microbatches)
    groups = [range(first, first + ranks) for first in range(0, count, ranks)]
    forwards = [(Op.FORWARD, stage, place) for group in groups for stage in stages for place in group]
    backwards = [(Op.BACKWARD, stage, place) for group in groups for stage in stages[::-1] for place in group]
    order = _in_turns(forwards, backwards, ahead=2 * (ranks - 1 - rank) + (len(stages) - 1) * ranks)
    return [Action(op, stage, microbatches[place]) for op, stage, place in order if place < count]


def _in_turns(forwards: list[T], backwards: list[T], *, ahead: int) -> list[T]:
    ahead = min(ahead, len(forwards))
    turns = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


@_of_each_rank
def zb_h1(layout: Layout, rank: int, microbatches: Sequence[int]) -> Sequence[Action]:
    """Forwards and backwards to the inputs in turns, on one stage per rank; those to the weights fill the bubble.

    The next rank waits for gradients of inputs only. The bubble between a rank's first and last action is
    (P-1)(f+i-w), and no rank keeps more than P activations. ZB-H1 (Qi et al. 2023, arXiv:2401.10241).
    """
    count = len(microbatches)
    forwards = min(layout.ranks - 1 - rank, count)
    plan = [Action(Op.FORWARD, rank, microbatch) for microbatch in microbatches[:forwards]]
    weights = 0
    for microbatch in microbatches:
        if forwards < count:
            plan.append(Action(Op.FORWARD, rank, microbatches[forwards]))
            forwards += 1
        plan.append(Action(Op.INPUT_BACKWARD, rank, microbatch))
        if forwards - weights == layout.ranks or forwards == count:
            plan.append(Action(Op.WEIGHT_BACKWARD, rank, microbatches[weights]))
            weights += 1
    return plan + [Action(Op.WEIGHT_BACKWARD, rank, microbatch) for microbatch in microbatches[weights:]]


@_of_each_rank
def zb_v(layout: Layout, rank: int, microbatches: Sequence[int]) -> Sequence[Action]:
    """Six actions of two stages in turns, on stages that go through the ranks and back.

    There is no bubble between a rank's first and last action where f, i and w take as long, and at most P micro-batches
    of a rank's share live at once. With fewer than 2P-1 micro-batches the order is that of 2P-1 with the missing ones
    left out. ZB-V (Qi et al. 2023, arXiv:2401.10241).
    """
    count = max(len(microbatches), 2 * layout.ranks - 1)
    from_below = layout.ranks - rank
    turns = [
        ("F0", 2 * from_below - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", from_below),
        ("F0 I0 W0 F1 I1 W1", count - from_below - rank),  # all six, as long as there are forwards
        ("I0 I1", rank),
        ("I0 W0", from_below),
        ("W1 W0", count),
    ]
    ops = {"F": Op.FORWARD, "I": Op.INPUT_BACKWARD, "W": Op.WEIGHT_BACKWARD}
    done: Counter[str] = Counter()
    plan: list[Action] = []
    for turn, times in turns:
        names = turn.split()
        left = len(microbatches) - min(done[name] for name in names)
        for name in names * min(times, left):
            place = done[name]
            done[name] += 1
            if place < len(microbatches):
                plan.append(Action(ops[name[0]], layout.stages_of(rank)[int(name[1])], microbatches[place]))
    return plan


_ROUND: dict[str, Any] = {"min_stages_per_rank": 2, "max_stages_per_rank": None}
_V: dict[str, Any] = {"min_stages_per_rank": 2, "max_stages_per_rank": 2, "v_shaped": True, "splits_backward": True}
_ROWS = (
    Schedule("sequential", sequential, "one micro-batch at a time, least memory", max_stages_per_rank=None),
    Schedule("gpipe", breadth_first, "all forwards, then all backwards"),
    Schedule("1f1b", one_f_one_b, "backward as soon as possible: GPipe's time, less memory"),
    Schedule("interleaved", interleaved, "1F1B over several stages per rank: less bubble, more messages", **_ROUND),
    Schedule("breadth_first", breadth_first, "stage after stage for all micro-batches: for sharded weights", **_ROUND),
    Schedule("zb_h1", zb_h1, "1F1B whose bubble is filled with gradients of weights", splits_backward=True),
    Schedule("zb_v", zb_v, "hardly any bubble, the memory of 1F1B", **_V),
)
SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _ROWS}
"""All pipeline schedules by name."""
