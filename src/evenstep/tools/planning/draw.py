"""Timelines of pipeline ranks: as text, and as Chrome traces for Perfetto.

In text, `F3` is the forward of micro-batch 3, `1F3` that of stage 1 where a rank owns several. Dots are idle time.
"""

import json

from rich.text import Text

from evenstep.pipeline.order import Span
from evenstep.tools.planning.simulate import Simulation

_COLORS = {"F": "on blue", "B": "on green", "I": "on dark_orange3", "W": "on purple"}


def draw_text(simulation: Simulation, *, width: int = 100) -> list[Text]:
    """One line for each rank.

    >>> from evenstep.pipeline import Layout, SCHEDULES
    >>> from evenstep.tools.planning.simulate import Cost, Costs, simulate
    >>> layout = Layout.chain(ranks=2)
    >>> costs = Costs.even(layout, Cost(forward_s=1, input_backward_s=1, weight_backward_s=1))
    >>> simulation = simulate(SCHEDULES["1f1b"].plans(layout, [0, 1]), layout, costs)
    >>> for line in draw_text(simulation, width=36):
    ...     print(line)
    F0--F1--........B0------....B1------
    ....F0--B0------F1--B1------........
    """
    lines: list[Text] = []
    scale = width / simulation.makespan_s if simulation.makespan_s else 0
    for rank in range(len(simulation.busy_s)):
        spans = [span for span in simulation.spans if span.rank == rank]
        several = len({span.action.stage for span in spans}) > 1
        line = Text()
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            line.append("." * (start - len(line)), style="dim")
            line.append(_label(span, several, end - start), style=_COLORS[span.action.op.value])
        line.append("." * (width - len(line)), style="dim")
        lines.append(line)
    return lines


def _label(span: Span, several: bool, room: int) -> str:
    op = span.action.op.value
    label = str(span.action) if several else f"{op}{span.action.microbatch}"
    if len(label) >= room:  # a dash must separate it from the next one
        label = op[:room]
    return label.ljust(room, "-")


def draw_trace(simulation: Simulation) -> str:
    """Chrome trace of a simulated update, as Perfetto opens it: one line for each rank, times in microseconds."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(simulation.busy_s))
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
        for span in simulation.spans
    ]
    return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}) + "\n"
