"""Timelines of simulated plans: in characters, and as a Chrome trace for Perfetto.

`F3` is the forward of micro-batch 3, `1F3` that of stage 1 where a rank owns several. Dots are idle time.
"""

import json

from evenstep.pipeline.action import Op
from evenstep.pipeline.order import Span
from evenstep.tools.planning.simulate import Simulation

Piece = tuple[str, Op | None]
"""Some characters of a line, and the kind of computation that they show, or None for idle time."""


def draw_text(simulation: Simulation, *, width: int = 100) -> list[list[Piece]]:
    """The timeline of each rank.

    >>> from evenstep.pipeline import Layout, SCHEDULES
    >>> from evenstep.tools.planning.simulate import Costs, simulate
    >>> layout = Layout.chain(ranks=2)
    >>> costs = Costs.even(layout, forward_s=1, input_backward_s=1, weight_backward_s=1)
    >>> simulation = simulate(SCHEDULES["1f1b"].plans(layout, [0, 1]), layout, costs)
    >>> for pieces in draw_text(simulation, width=36):
    ...     print("".join(text for text, _ in pieces))
    F0--F1--........B0------....B1------
    ....F0--B0------F1--B1------........
    """
    lines: list[list[Piece]] = []
    scale = width / simulation.makespan_s if simulation.makespan_s else 0
    for rank in range(len(simulation.busy_s)):
        spans = [span for span in simulation.spans if span.rank == rank]
        several = len({span.action.stage for span in spans}) > 1
        pieces: list[Piece] = []
        at = 0
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            if start > at:
                pieces.append(("." * (start - at), None))
            if end > start:
                pieces.append((_label(span, several, end - start), span.action.op))
            at = end
        if at < width:
            pieces.append(("." * (width - at), None))
        lines.append(pieces)
    return lines


def _label(span: Span, several: bool, room: int) -> str:
    op = span.action.op.value
    for label in (str(span.action) if several else op, f"{op}{span.action.microbatch}"):
        if len(label) > 1 and len(label) < room:  # so that a dash tells it from the next
            return label.ljust(room, "-")
    return op.ljust(room, "-")


def draw_trace(simulation: Simulation) -> str:
    """The JSON text of a Chrome trace: one row per rank, times in microseconds."""
    rows: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(simulation.busy_s))
    ]
    boxes: list[dict[str, object]] = [
        {
            "name": str(span.action),
            "cat": span.action.op.name,
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "ts": float(span.start * 1e6),
            "dur": float((span.end - span.start) * 1e6),
        }
        for span in simulation.spans
    ]
    return json.dumps({"traceEvents": rows + boxes, "displayTimeUnit": "ms"})
