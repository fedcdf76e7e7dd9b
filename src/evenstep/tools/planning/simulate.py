"""Simulates time, idle time, memory and traffic of pipeline plans for given costs of the stages.

Messages take α + β·bytes. Congestion, received copies and data-parallel reductions are left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Self, final

from evenstep.errors import ArgumentError
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.order import Span, spans


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one layer, or of one stage, per micro-batch.

    Args:
        activation_bytes: kept from the forward to the last backward.
        output_bytes: sent to the next stage; as many come back as gradients.
        state_bytes: held all the time: parameters, gradients, optimizer state.
    """

    forward_s: float = 0
    input_backward_s: float = 0
    weight_backward_s: float = 0
    activation_bytes: float = 0
    output_bytes: float = 0
    state_bytes: float = 0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.input_backward_s + self.weight_backward_s

    @classmethod
    def total(cls, costs: Iterable[Self]) -> Self:
        """Sum of the costs, field by field."""
        every = list(costs)
        return cls(**{one.name: sum(getattr(cost, one.name) for cost in every) for one in fields(cls)})

    def divided(self, parts: int) -> "Cost":
        """Cost of one of several equal parts, each of which sends the whole output."""
        shares = {one.name: getattr(self, one.name) / parts for one in fields(self)}
        return Cost(**{**shares, "output_bytes": self.output_bytes})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of all stages of a model and of the messages between them.

    Args:
        edge_bytes: size of a message in either direction, by edge between stages; 0 where left out.
        latency_s: α, seconds of any message between ranks.
        seconds_per_byte: β, of a message between ranks.
    """

    stages: tuple[Cost, ...]
    edge_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    latency_s: float = 0
    seconds_per_byte: float = 0

    @classmethod
    def even(cls, layout: Layout, share: Cost, *, latency_s: float = 0, seconds_per_byte: float = 0) -> Self:
        """Costs of equal stages.

        Args:
            share: cost of all stages of one rank together.
        """
        stage = share.divided(layout.stages // layout.ranks)
        return cls(
            stages=(stage,) * layout.stages,
            edge_bytes=dict.fromkeys(layout.edges, share.output_bytes),
            latency_s=latency_s,
            seconds_per_byte=seconds_per_byte,
        )

    def duration(self, action: Action) -> float:
        """Seconds of one computation."""
        stage = self.stages[action.stage]
        return {
            Op.FORWARD: stage.forward_s,
            Op.INPUT_BACKWARD: stage.input_backward_s,
            Op.WEIGHT_BACKWARD: stage.weight_backward_s,
            Op.BACKWARD: stage.input_backward_s + stage.weight_backward_s,
        }[action.op]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Simulated update.

    Args:
        makespan_s: seconds from the first start to the last end of all ranks.
        peak_bytes: largest memory of each rank.
        peak_live: most activations of a stage that live at once, by rank.
        link_bytes: traffic from rank to rank, by (sender, receiver).
    """

    spans: tuple[Span, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    peak_live: tuple[int, ...]
    link_bytes: Mapping[tuple[int, int], float]

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Idle seconds of each rank."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Idle share of all ranks' time: 0 to 1."""
        whole = self.makespan_s * len(self.busy_s)
        return sum(self.bubble_s) / whole if whole else 0


def simulate(plans: Sequence[Plan], layout: Layout, costs: Costs) -> Simulation:
    """Simulate one update.

    Args:
        plans: of all ranks; complete ones, or their computations alone, which give the same.

    >>> from evenstep.pipeline.schedules import gpipe
    >>> layout = Layout.chain(ranks=2)
    >>> costs = Costs.even(layout, Cost(forward_s=1, input_backward_s=1, weight_backward_s=1))
    >>> simulate(gpipe(layout, range(4)), layout, costs).bubble_s  # (P-1)(f+b)
    (3.0, 3.0)
    """
    if len(costs.stages) != layout.stages:
        raise ArgumentError(
            f"`costs` must be of the {layout.stages} stages, but are of {len(costs.stages)}.", field="costs"
        )
    delays = {
        edge: costs.latency_s + costs.seconds_per_byte * costs.edge_bytes.get(edge, 0)
        for edge in layout.edges
        if layout.rank_of[edge[0]] != layout.rank_of[edge[1]]
    }
    found = spans(plans, layout, costs.duration, delays)
    busy: list[float] = [0] * layout.ranks
    for span in found:
        busy[span.rank] += span.end - span.start
    count = sum(span.action.op is Op.FORWARD and span.action.stage == 0 for span in found)
    links: Counter[tuple[int, int]] = Counter()
    for source, destination in delays:
        here, there = layout.rank_of[source], layout.rank_of[destination]
        size = count * costs.edge_bytes.get((source, destination), 0)
        links.update({(here, there): size, (there, here): size})  # pyright: ignore[reportArgumentType] - may be floats
    return Simulation(
        spans=tuple(found),
        makespan_s=max((span.end for span in found), default=0),
        busy_s=tuple(busy),
        peak_bytes=tuple(_peak_bytes(plan, layout.stages_of(rank), costs) for rank, plan in enumerate(plans)),
        peak_live=tuple(max(accumulate(map(_change, plan)), default=0) for plan in plans),
        link_bytes=dict(sorted(links.items())),
    )


def _change(action: Action) -> int:
    """Change of the number of activations that live."""
    return (action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.WEIGHT_BACKWARD))


def _peak_bytes(plan: Plan, stages: Sequence[int], costs: Costs) -> float:
    state = sum(costs.stages[stage].state_bytes for stage in stages)
    changes = (_change(action) * costs.stages[action.stage].activation_bytes for action in plan)
    return state + max(accumulate(changes), default=0)
