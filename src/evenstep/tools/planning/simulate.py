"""Simulates time, idle time and memory of pipeline plans for given costs of the stages; messages take no time."""

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from evenstep.pipeline.action import Action, Layout, Op, Plan
from evenstep.pipeline.lower import Span, spans


class Cost(NamedTuple):
    """Cost of a layer or a stage per micro-batch.

    Args:
        activation_bytes: kept from the forward to the last backward.
        state_bytes: parameters and gradients, held all the time.
    """

    forward_s: float = 0
    input_backward_s: float = 0
    weight_backward_s: float = 0
    activation_bytes: float = 0
    state_bytes: float = 0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.input_backward_s + self.weight_backward_s

    def of(self, op: Op) -> float:
        """Seconds of one computation of the stage."""
        return {
            Op.FORWARD: self.forward_s,
            Op.INPUT_BACKWARD: self.input_backward_s,
            Op.WEIGHT_BACKWARD: self.weight_backward_s,
            Op.BACKWARD: self.input_backward_s + self.weight_backward_s,
        }[op]


class Simulation(NamedTuple):
    """Simulated update.

    Args:
        makespan_s: seconds from the first start to the last end of all ranks.
        peak_bytes: largest memory of each rank.
        peak_live: most activations of a stage that live at once, by rank.
    """

    spans: tuple[Span, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Idle seconds of each rank."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Idle share of all ranks' time: 0 to 1."""
        whole = self.makespan_s * len(self.busy_s)
        return sum(self.bubble_s) / whole if whole else 0

    def trace(self) -> str:
        """Chrome trace, as Perfetto opens it: one line for each rank, times in microseconds."""
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(len(self.busy_s))
        ]
        for span in self.spans:
            kind = {"name": str(span.action), "cat": span.action.op.name, "ph": "X", "pid": 0, "tid": span.rank}
            events.append({**kind, "ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def simulate(plans: Sequence[Plan], layout: Layout, costs: Sequence[Cost]) -> Simulation:
    """Simulate one update, from the plans of all ranks (complete, or computations alone) and the costs of all stages.

    >>> from evenstep.pipeline.schedules import breadth_first
    >>> layout = Layout.chain(ranks=2)
    >>> costs = [Cost(forward_s=1.0, input_backward_s=1.0, weight_backward_s=1.0)] * 2
    >>> simulate(breadth_first(layout, range(4)), layout, costs).bubble_s  # (P-1)(f+b)
    (3.0, 3.0)
    """
    found = tuple(spans(plans, layout, lambda action: costs[action.stage].of(action.op)))
    busy: list[float] = [0] * layout.ranks
    for span in found:
        busy[span.rank] += span.end - span.start
    states = [sum(costs[stage].state_bytes for stage in layout.stages_of(rank)) for rank in range(layout.ranks)]
    kept = [[_change(action) * costs[action.stage].activation_bytes for action in plan] for plan in plans]
    return Simulation(
        spans=found,
        makespan_s=max((span.end for span in found), default=0),
        busy_s=tuple(busy),
        peak_bytes=tuple(state + max(accumulate(sizes), default=0) for state, sizes in zip(states, kept, strict=True)),
        peak_live=tuple(max(accumulate(map(_change, plan)), default=0) for plan in plans),
    )


def _change(action: Action) -> int:
    """Change of the number of activations that live."""
    return (action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.WEIGHT_BACKWARD))
