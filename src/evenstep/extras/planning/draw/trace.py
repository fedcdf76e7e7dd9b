"""A timeline in Chrome's trace format, for Perfetto and chrome://tracing.

One row per rank. Nothing was measured: it is the simulation.
"""

import json

from evenstep.extras.planning.simulate import Simulation


def draw_trace(simulation: Simulation) -> str:
    """The JSON text, with times in microseconds.

    >>> from evenstep.pipeline import Layout, SCHEDULES
    >>> from evenstep.extras.planning.simulate import Costs, simulate
    >>> layout = Layout.chain(ranks=1)
    >>> costs = Costs.even(layout, forward_s=0.5, input_backward_s=1, weight_backward_s=1)
    >>> trace = draw_trace(simulate(SCHEDULES["sequential"].plans(layout, [7]), layout, costs))
    >>> json.loads(trace)["traceEvents"][1]
    {'name': '0F7', 'cat': 'FORWARD', 'ph': 'X', 'pid': 0, 'tid': 0, 'ts': 0.0, 'dur': 500000.0}
    """
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
