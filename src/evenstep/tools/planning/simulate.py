"""Simulates time, idle time, memory and traffic of pipeline plans for given costs of the stages.

Messages take α + β·bytes. Congestion, received copies and data-parallel reductions are left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

from evenstep.errors import ArgumentError
from evenstep.pipeline.action import Action, Op, Plan
from evenstep.pipeline.layout import Layout
from evenstep.pipeline.order import Span, spans

_CROSSES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_BACKWARD)  # what gives something to send


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the stages of a model cost, per micro-batch.

    Args:
        activation_bytes: that each stage keeps from its forward to its backward.
        deferred_bytes: of these, what stays between the backwards of inputs and of weights; all by default.
        edge_bytes: of what goes from one stage to another, by edge; as many come back as gradients. 0 where left out.
        state_bytes: that each stage holds all the time: parameters, gradients, optimizer.
        latency_s: α, seconds of any message between ranks.
        seconds_per_byte: β, of a message between ranks.
    """

    forward_s: tuple[float, ...]
    input_backward_s: tuple[float, ...]
    weight_backward_s: tuple[float, ...]
    activation_bytes: tuple[float, ...] = ()
    deferred_bytes: tuple[float, ...] = ()
    edge_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    state_bytes: tuple[float, ...] = ()
    latency_s: float = 0
    seconds_per_byte: float = 0

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if not self.activation_bytes:
            object.__setattr__(self, "activation_bytes", (0,) * stages)
        if not self.deferred_bytes:
            object.__setattr__(self, "deferred_bytes", self.activation_bytes)
        if not self.state_bytes:
            object.__setattr__(self, "state_bytes", (0,) * stages)
        each = (self.input_backward_s, self.weight_backward_s, self.activation_bytes, self.deferred_bytes)
        if any(len(values) != stages for values in (*each, self.state_bytes)):
            raise ArgumentError(f"costs must have one number for each of the {stages} stages; give as many everywhere.")

    @classmethod
    def even(
        cls,
        layout: Layout,
        *,
        forward_s: float,
        input_backward_s: float,
        weight_backward_s: float,
        activation_bytes: float = 0,
        deferred_bytes: float | None = None,
        edge_bytes: float = 0,
        state_bytes: float = 0,
        latency_s: float = 0,
        seconds_per_byte: float = 0,
    ) -> "Costs":
        """The costs of one rank's share of the model, spread evenly over the stages of each rank.

        Args:
            forward_s: seconds of one rank's forward of one micro-batch; likewise the others, see `Costs`.
        """
        each = layout.stages // layout.ranks

        def spread(share: float) -> tuple[float, ...]:
            return (share / each,) * layout.stages

        return cls(
            forward_s=spread(forward_s),
            input_backward_s=spread(input_backward_s),
            weight_backward_s=spread(weight_backward_s),
            activation_bytes=spread(activation_bytes),
            deferred_bytes=spread(activation_bytes if deferred_bytes is None else deferred_bytes),
            edge_bytes=dict.fromkeys(layout.edges, edge_bytes),
            state_bytes=spread(state_bytes),
            latency_s=latency_s,
            seconds_per_byte=seconds_per_byte,
        )

    def duration(self, action: Action) -> float:
        """Seconds that a computation takes."""
        stage = action.stage
        if action.op is Op.FORWARD:
            return self.forward_s[stage]
        if action.op is Op.INPUT_BACKWARD:
            return self.input_backward_s[stage]
        if action.op is Op.WEIGHT_BACKWARD:
            return self.weight_backward_s[stage]
        return self.input_backward_s[stage] + self.weight_backward_s[stage]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What plans cost; see `simulate`.

    Args:
        makespan_s: seconds from the first start to the last end of all ranks.
        peak_bytes: the most memory that each rank holds at once.
        link_bytes: that go from one rank to another, by (sender, receiver).
    """

    spans: tuple[Span, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    peak_live: tuple[int, ...]
    link_bytes: Mapping[tuple[int, int], float]

    @property
    def bytes_sent(self) -> tuple[float, ...]:
        """Bytes that each rank sends to others."""
        sent: list[float] = [0] * len(self.busy_s)
        for (sender, _), size in self.link_bytes.items():
            sent[sender] += size
        return tuple(sent)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank is idle."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Share of all ranks' time in which they are idle: 0 to 1."""
        whole = self.makespan_s * len(self.busy_s)
        return sum(self.bubble_s) / whole if whole else 0


def simulate(plans: Sequence[Plan], layout: Layout, costs: Costs) -> Simulation:
    """Run `plans` on paper.

    Args:
        plans: of all ranks; complete ones, or their computations alone, which give the same.

    >>> from evenstep.pipeline.schedules import gpipe
    >>> layout = Layout.chain(ranks=2)
    >>> costs = Costs.even(layout, forward_s=1, input_backward_s=1, weight_backward_s=1)
    >>> simulate(gpipe(layout, range(4)), layout, costs).bubble_s  # (P-1)(f+b)
    (3.0, 3.0)
    """
    if len(costs.forward_s) != layout.stages:
        raise ArgumentError(f"costs must be of the {layout.stages} stages, but are of {len(costs.forward_s)}.")
    delays = {
        edge: costs.latency_s + costs.seconds_per_byte * costs.edge_bytes.get(edge, 0)
        for edge in layout.edges
        if layout.rank_of[edge[0]] != layout.rank_of[edge[1]]
    }
    found = spans(plans, layout, costs.duration, delays)
    busy: list[float] = [0] * layout.ranks
    for span in found:
        busy[span.rank] += span.end - span.start
    return Simulation(
        spans=tuple(found),
        makespan_s=max((span.end for span in found), default=0),
        busy_s=tuple(busy),
        peak_bytes=tuple(_peak_bytes(plan, layout.stages_of(rank), costs) for rank, plan in enumerate(plans)),
        peak_live=tuple(map(_peak_live, plans)),
        link_bytes=_link_bytes(found, layout, costs),
    )


def _peak_bytes(plan: Plan, stages: Sequence[int], costs: Costs) -> float:
    held = peak = sum(costs.state_bytes[stage] for stage in stages)
    for action in plan:
        stage = action.stage
        if action.op is Op.FORWARD:
            held += costs.activation_bytes[stage]
            peak = max(peak, held)
        elif action.op is Op.BACKWARD:
            held -= costs.activation_bytes[stage]
        elif action.op is Op.INPUT_BACKWARD:
            held -= costs.activation_bytes[stage] - costs.deferred_bytes[stage]
        elif action.op is Op.WEIGHT_BACKWARD:
            held -= costs.deferred_bytes[stage]
    return peak


def _peak_live(plan: Plan) -> int:
    changes = ((action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.WEIGHT_BACKWARD)) for action in plan)
    return max(accumulate(changes), default=0)


def _link_bytes(found: Sequence[Span], layout: Layout, costs: Costs) -> dict[tuple[int, int], float]:
    rank_of = layout.rank_of
    runs = Counter((span.action.op is Op.FORWARD, span.action.stage) for span in found if span.action.op in _CROSSES)
    sent: dict[tuple[int, int], float] = {}
    for source, destination in layout.edges:
        size = costs.edge_bytes.get((source, destination), 0)
        here, there = rank_of[source], rank_of[destination]
        if here != there:
            sent[here, there] = sent.get((here, there), 0) + runs[True, source] * size
            sent[there, here] = sent.get((there, here), 0) + runs[False, destination] * size
    return dict(sorted(sent.items()))
