"""When each action of a set of plans can start: every rank in its own order, every action after what it needs.

A forward needs the forwards of the stages that feed it, a backward its own forward and the backwards of the stages that
it feeds, a weight-backward its input-backward. Starts follow from that alone, since each rank's order is given. It
knows durations only as numbers that the caller gives, and communication only as a delay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from evenstep.errors import PlanError
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout

COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_BACKWARD, Op.WEIGHT_BACKWARD)
# What an action leaves behind for others: an output, a gradient of its inputs, or gradients of its weights.
Product = tuple[str, int, int]


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


def products(action: Action) -> tuple[Product, ...]:
    """What `action` leaves behind.

    >>> products(Action(Op.BACKWARD, 2, 5))
    (('input gradient', 2, 5), ('weight gradient', 2, 5))
    """
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return (("output", stage, microbatch),)
    if action.op is Op.INPUT_BACKWARD:
        return (("input gradient", stage, microbatch),)
    if action.op is Op.WEIGHT_BACKWARD:
        return (("weight gradient", stage, microbatch),)
    return (("input gradient", stage, microbatch), ("weight gradient", stage, microbatch))


@final
class Needs:
    """What compute actions need of each other in one layout.

    Args:
        layout: of the stages.

    >>> Needs(Layout.chain(ranks=2))(Action(Op.BACKWARD, 0, 5))
    (('output', 0, 5), ('input gradient', 1, 5))
    """

    def __init__(self, layout: Layout) -> None:
        stages = range(layout.stages)
        self.sources: list[list[int]] = [[] for _ in stages]
        self.destinations: list[list[int]] = [[] for _ in stages]
        for source, destination in layout.edges:
            self.sources[destination].append(source)
            self.destinations[source].append(destination)

    def __call__(self, action: Action) -> tuple[Product, ...]:
        """The products without which `action` cannot start."""
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.FORWARD:
            return tuple(("output", source, microbatch) for source in self.sources[stage])
        if action.op is Op.WEIGHT_BACKWARD:
            return (("input gradient", stage, microbatch),)
        gradients = (("input gradient", destination, microbatch) for destination in self.destinations[stage])
        return (("output", stage, microbatch), *gradients)


def spans(
    plans: Sequence[Plan],
    layout: Layout,
    duration: Callable[[Action], float],
    delay: Callable[[Product, int], float] = lambda product, stage: 0,
) -> list[Span]:
    """Start and end of every compute action, each as early as the order of its rank and its needs allow.

    Args:
        plans: one per rank; whatever is no compute action in them is passed over.
        layout: of the stages.
        duration: of an action.
        delay: how long a product takes to the stage that needs it.

    Returns:
        All spans, sorted by start and rank.

    Raises:
        PlanError: the ranks wait for each other in a circle, or for something that no plan makes.

    >>> from evenstep.pipeline.schedules.gpipe import gpipe
    >>> layout = Layout.chain(ranks=2)
    >>> [f"{s.action}@{s.start}" for s in spans(gpipe(layout, [0]), layout, lambda action: 1)]
    ['0F0@0', '1F0@1', '1B0@2', '0B0@3']
    """
    needs = Needs(layout)
    orders = [[action for action in plan if action.op in COMPUTES] for plan in plans]
    places = [0] * len(orders)
    free: list[float] = [0] * len(orders)
    made: dict[Product, float] = {}
    waiting: dict[Product, list[int]] = {}
    found: list[Span] = []
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order, place = orders[rank], places[rank]
        while place < len(order):
            action = order[place]
            wanted = needs(action)
            missing = next((product for product in wanted if product not in made), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            arrivals = [made[product] + delay(product, action.stage) for product in wanted]
            start = max(free[rank], *arrivals) if arrivals else free[rank]
            free[rank] = end = start + duration(action)
            found.append(Span(rank, action, start, end))
            for product in products(action):
                made[product] = end
                ready += waiting.pop(product, ())
            place += 1
        places[rank] = place
    stuck = [f"rank {waiter} waits for {_said(product)}" for product, ranks in waiting.items() for waiter in ranks]
    if stuck:
        raise PlanError(
            f"the plans cannot be run to their end: {', '.join(sorted(stuck)[:8])}; each must come before what needs "
            f"it, in the order of its own rank and so that no ranks wait for each other in a circle."
        )
    return sorted(found, key=lambda span: (span.start, span.rank))


def _said(product: Product) -> str:
    kind, stage, microbatch = product
    return f"the {kind} of stage {stage}, micro-batch {microbatch}"
