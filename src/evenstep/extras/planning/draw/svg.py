"""A timeline as one SVG file: a row per rank, a box per computation, a scale, and a legend.

Boxes have the colour of what is done, darker for the later stages of a rank, and the micro-batch's number where there
is room; the whole name shows when pointed at. It needs no other file, font or script.
"""

from html import escape

from evenstep.extras.planning.simulate import Simulation
from evenstep.pipeline.action import WORDS, Op

_ROW, _GAP, _LEFT, _TOP, _WIDTH = 26, 6, 70, 56, 1200
_HUES = {Op.FORWARD: 205, Op.BACKWARD: 140, Op.INPUT_BACKWARD: 35, Op.WEIGHT_BACKWARD: 265}


def draw_svg(simulation: Simulation, *, title: str) -> str:
    """The SVG text, with a title above.

    >>> from evenstep.pipeline import Layout, SCHEDULES
    >>> from evenstep.extras.planning.simulate import Costs, simulate
    >>> layout = Layout.chain(ranks=1)
    >>> costs = Costs.even(layout, forward_s=1, input_backward_s=1, weight_backward_s=1)
    >>> draw_svg(simulate(SCHEDULES["sequential"].plans(layout, [7]), layout, costs), title="one").count("<rect")
    6
    """
    ranks = len(simulation.busy_s)
    scale = _WIDTH / float(simulation.makespan_s) if simulation.makespan_s else 0.0
    bottom = _TOP + ranks * (_ROW + _GAP)
    stages = {
        rank: sorted({span.action.stage for span in simulation.spans if span.rank == rank}) for rank in range(ranks)
    }
    width, height = _LEFT + _WIDTH + 20, bottom + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" style="font-size: 15px">{escape(title)}</text>',
        *_legend({span.action.op for span in simulation.spans}),
    ]
    for rank in range(ranks):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#f0f0f0"/>')
    for span in simulation.spans:
        action = span.action
        x, width = _LEFT + float(span.start) * scale, float(span.end - span.start) * scale
        y = _TOP + span.rank * (_ROW + _GAP)
        fill = _fill(action.op, stages[span.rank].index(action.stage))
        parts.append(
            f'<g><title>{action}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{fill}" '
            f'stroke="white" stroke-width="{min(1.0, width / 6):.2f}"/>'
        )
        label = str(action.microbatch)
        if width >= 8 * len(label):
            parts.append(f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle">{label}</text>')
        parts.append("</g>")
    return "\n".join([*parts, *_scale(float(simulation.makespan_s), scale, bottom), "</svg>\n"])


def _fill(op: Op, chunk: int) -> str:
    return f"hsl({_HUES[op]},70%,{max(80 - 12 * chunk, 40)}%)"


def _legend(ops: set[Op]) -> list[str]:
    parts: list[str] = []
    x = _LEFT
    for op in (op for op in _HUES if op in ops):
        parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="{_fill(op, 0)}"/>')
        parts.append(f'<text x="{x + 19}" y="42">{op.value} {WORDS[op]}</text>')
        x += 60 + 7 * len(WORDS[op])
    parts.append(f'<text x="{x}" y="42">numbers: micro-batches; darker: later stage of the rank</text>')
    return parts


def _scale(makespan_s: float, scale: float, bottom: int) -> list[str]:
    parts = [f'<line x1="{_LEFT}" y1="{bottom}" x2="{_LEFT + _WIDTH}" y2="{bottom}" stroke="#888"/>']
    for tick in range(11):
        at = makespan_s * tick / 10
        x = _LEFT + at * scale
        parts.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="#888"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{1e3 * at:.4g}</text>')
    parts.append(f'<text x="{_LEFT - 8}" y="{bottom + 19}" text-anchor="end">ms</text>')
    return parts
