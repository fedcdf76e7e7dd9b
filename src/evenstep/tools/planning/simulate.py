"""Simulates time, idle time and memory of pipeline plans for given costs of the stages; messages take no time."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Self, final

from evenstep.pipeline.action import Action, Layout, Op, Plan
from evenstep.pipeline.lower import Span, spans


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one layer, or of one stage, per micro-batch.

    Args:
        activation_bytes: kept from the forward to the last backward.
        state_bytes: held all the time: parameters and gradients.
    """

    forward_s: float = 0
    input_backward_s: float = 0
    weight_backward_s: float = 0
    activation_bytes: float = 0
    state_bytes: float = 0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.input_backward_s + self.weight_backward_s

    @classmethod
    def total(cls, costs: Iterable[Self]) -> Self:
        """Sum of the costs, field by field."""
        every = list(costs)
        return cls(**{one.name: sum(getattr(cost, one.name) for cost in every) for one in fields(cls)})

    def of(self, action: Action) -> float:
        """Seconds of one computation of the stage."""
        return {
            Op.FORWARD: self.forward_s,
            Op.INPUT_BACKWARD: self.input_backward_s,
            Op.WEIGHT_BACKWARD: self.weight_backward_s,
            Op.BACKWARD: self.input_backward_s + self.weight_backward_s,
        }[action.op]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
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
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(len(self.busy_s))
        ]
        events = [
            {
                "name": str(span.action),
                "cat": span.action.op.name,
                "ph": "X",
                "pid": 0,
                "tid": span.rank,
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}) + "\n"


def simulate(plans: Sequence[Plan], layout: Layout, costs: Sequence[Cost]) -> Simulation:
    """Simulate one update.

    Args:
        plans: of all ranks; complete ones, or their computations alone, which give the same.
        costs: of all stages.

    >>> from evenstep.pipeline.schedules import gpipe
    >>> layout = Layout.chain(ranks=2)
    >>> costs = [Cost(forward_s=1.0, input_backward_s=1.0, weight_backward_s=1.0)] * 2
    >>> simulate(gpipe(layout, range(4)), layout, costs).bubble_s  # (P-1)(f+b)
    (3.0, 3.0)
    """
    found = spans(plans, layout, lambda action: costs[action.stage].of(action))
    busy: list[float] = [0] * layout.ranks
    for span in found:
        busy[span.rank] += span.end - span.start
    return Simulation(
        spans=tuple(found),
        makespan_s=max((span.end for span in found), default=0),
        busy_s=tuple(busy),
        peak_bytes=tuple(_peak_bytes(plan, layout.stages_of(rank), costs) for rank, plan in enumerate(plans)),
        peak_live=tuple(max(accumulate(map(_change, plan)), default=0) for plan in plans),
    )


def _change(action: Action) -> int:
    """Change of the number of activations that live."""
    return (action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.WEIGHT_BACKWARD))


def _peak_bytes(plan: Plan, stages: Sequence[int], costs: Sequence[Cost]) -> float:
    state = sum(costs[stage].state_bytes for stage in stages)
    changes = (_change(action) * costs[action.stage].activation_bytes for action in plan)
    return state + max(accumulate(changes), default=0)
