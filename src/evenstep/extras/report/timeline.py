"""The recorded update of a run as a picture: what each rank did, and under it what its plan would have taken.

The plan is that which was recorded, simulated with the median time of each kind of action of each stage, messages that
take no time, and nobody else on the machine. So what is longer above than below is waiting, traffic, or uneven work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from evenstep.errors import ArgumentError, PlanError
from evenstep.extras.planning.simulate import Costs, simulate
from evenstep.extras.timeline import RankTimeline
from evenstep.pipeline import Layout, Op
from evenstep.pipeline.action import COMPUTES, WORDS, Action

MAX_ROWS = 32
_WIDTH, _LEFT, _ROW, _GAP, _TOP = 960.0, 66.0, 22.0, 5.0, 4.0
_LETTERS = {Op.FORWARD: "f", Op.BACKWARD: "b", Op.INPUT_BACKWARD: "i", Op.WEIGHT_BACKWARD: "w", Op.REDUCE: "r"}
_OTHER = "m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """An action in a row of the picture.

    Args:
        kind: what it does, one letter: its class in the page's style.
        words: what it is, in full.
        label: short, for where there is room.
    """

    start_s: float
    end_s: float
    kind: str
    words: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Rows of boxes on one scale of time.

    Args:
        rows: a name and its boxes.
        span_s: from the first start to the last end.
    """

    title: str
    rows: tuple[tuple[str, tuple[Box, ...]], ...]
    span_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """What was recorded, what was planned, and what can't be shown.

    Args:
        planned: None where it can't be simulated.
    """

    update: int
    recorded: Picture
    planned: Picture | None
    legend: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def timelines(ranks: Sequence[RankTimeline]) -> Timelines | None:
    """The pictures of what `ranks` recorded; None if nothing was.

    Args:
        ranks: of them those with the newest update count.
    """
    if not ranks or not any(rank.actions for rank in ranks):
        return None
    update = max(rank.update for rank in ranks)
    of_update = sorted((rank for rank in ranks if rank.update == update), key=lambda rank: rank.rank)
    notes = [f"{len(ranks) - len(of_update)} ranks recorded an earlier update"] if len(of_update) < len(ranks) else []
    if len(of_update) > MAX_ROWS:
        notes.append(f"the first {MAX_ROWS} of {len(of_update)} ranks are shown")
    shown = of_update[:MAX_ROWS]
    began = min(rank.began for rank in shown)
    rows = [(f"rank {rank.rank}", tuple(_boxes(rank, rank.began - began))) for rank in shown]
    first = min((box.start_s for _, boxes in rows for box in boxes), default=0.0)
    last = max((box.end_s for _, boxes in rows for box in boxes), default=0.0)
    moved = tuple(
        (name, tuple(replace(box, start_s=box.start_s - first, end_s=box.end_s - first) for box in boxes))
        for name, boxes in rows
    )
    recorded = Picture(title="recorded", rows=moved, span_s=last - first)
    planned, why = _planned([rank for rank in of_update if rank.data_rank == shown[0].data_rank])
    if why:
        notes.append(why)
    ops = {one.action.op for rank in shown for one in rank.actions}
    kinds = [(WORDS[op], letter) for op, letter in _LETTERS.items() if op in ops]
    if ops - _LETTERS.keys():
        kinds.append(("message, gathering", _OTHER))
    if any(box.kind == "x" for _, boxes in moved for box in boxes):
        kinds.append(("waiting for another rank", "x"))
    legend = tuple(kinds)
    return Timelines(update=update, recorded=recorded, planned=planned, legend=legend, notes=tuple(notes))


def _boxes(rank: RankTimeline, offset: float) -> list[Box]:
    found: list[Box] = []
    for one in rank.actions:
        if one.action.op is Op.ARM:
            continue
        start, end = one.start_s + offset, one.end_s + offset
        # what an action waits for it needs before anything else
        work = end if one.action.op not in COMPUTES else start + one.waited_s
        if one.action.op in COMPUTES:
            if one.waited_s > 1e-6:
                words = f"{_words(one.action)}: waits {_milliseconds(one.waited_s)}"
                found.append(Box(start_s=start, end_s=work, kind="x", words=words, label=""))
            start = work
        found.append(_box(one.action, start, end))
    return found


def _box(action: Action, start: float, end: float) -> Box:
    label = str(action.microbatch) if action.op in COMPUTES else ""
    words = f"{_words(action)}: {_milliseconds(end - start)}"
    return Box(start_s=start, end_s=end, kind=_LETTERS.get(action.op, _OTHER), words=words, label=label)


def _words(action: Action) -> str:
    microbatch = f", micro-batch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"{WORDS[action.op]} of stage {action.stage}{microbatch}"


def _planned(ranks: Sequence[RankTimeline]) -> tuple[Picture | None, str]:
    """The plan of one pipeline on paper, and why there is none."""
    by_place = {rank.pipeline_rank: rank for rank in ranks}
    first = ranks[0]
    times: dict[tuple[int, Op], list[float]] = {}
    for rank in by_place.values():
        for one in rank.actions:
            times.setdefault((one.action.stage, one.action.op), []).append(one.end_s - one.start_s - one.waited_s)
    medians: Mapping[tuple[int, Op], float] = {key: median(seconds) for key, seconds in times.items()}
    stages = range(len(first.rank_of))

    def cost(op: Op) -> tuple[float, ...]:
        return tuple(medians.get((stage, op), 0.0) for stage in stages)

    whole, inputs = cost(Op.BACKWARD), cost(Op.INPUT_BACKWARD)
    try:
        layout = Layout(rank_of=first.rank_of, edges=first.edges)
        if set(by_place) != set(range(layout.ranks)):
            return None, "the plan can't be simulated, as not all ranks of a pipeline were recorded"
        costs = Costs(
            forward_s=cost(Op.FORWARD),
            input_backward_s=tuple(a or b for a, b in zip(whole, inputs, strict=True)),
            weight_backward_s=cost(Op.WEIGHT_BACKWARD),
        )
        plans = [tuple(one.action for one in by_place[place].actions) for place in range(layout.ranks)]
        done = simulate(plans, layout, costs)
    except (ArgumentError, PlanError, LookupError, ValueError) as error:
        return None, f"the plan can't be simulated: {error}"
    rows = [
        (
            f"rank {by_place[place].rank}",
            tuple(_box(span.action, span.start, span.end) for span in done.spans if span.rank == place),
        )
        for place in range(layout.ranks)
    ]
    return Picture(title="planned", rows=tuple(rows[:MAX_ROWS]), span_s=done.makespan_s), ""


def draw(picture: Picture, scale_s: float) -> str:
    """The picture as SVG that takes its colours from the page; all of it is made from numbers and known words.

    Args:
        scale_s: how many seconds are as wide as the picture.
    """
    height = _TOP + len(picture.rows) * (_ROW + _GAP) + 22
    wide = _WIDTH / scale_s if scale_s > 0 else 0.0
    said = f"{picture.title}: {len(picture.rows)} ranks, {_milliseconds(picture.span_s)}"
    parts = [f'<svg viewBox="0 0 {_LEFT + _WIDTH + 14:.0f} {height:.0f}" role="img" aria-label="{said}">']
    for place, (name, boxes) in enumerate(picture.rows):
        y = _TOP + place * (_ROW + _GAP)
        parts.append(f'<text x="{_LEFT - 8:.0f}" y="{y + 15:.0f}" text-anchor="end">{name}</text>')
        parts.append(f'<rect class="idle" x="{_LEFT:.0f}" y="{y:.0f}" width="{_WIDTH:.0f}" height="{_ROW:.0f}"/>')
        for box in boxes:
            x, width = _LEFT + box.start_s * wide, max((box.end_s - box.start_s) * wide, 0.6)
            parts.append(
                f'<rect class="{box.kind}" x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{_ROW:.0f}">'
                f"<title>{box.words}</title></rect>"
            )
            if box.label and width > 7.5 * len(box.label) + 2:
                parts.append(f'<text class="on" x="{x + width / 2:.2f}" y="{y + 15:.0f}">{box.label}</text>')
    y = height - 18
    for tick in range(6):
        x = _LEFT + _WIDTH * tick / 5
        anchor = " end" if tick == 5 else ""
        parts.append(
            f'<text class="tick{anchor}" x="{x:.1f}" y="{y + 13:.0f}">{_milliseconds(scale_s * tick / 5)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
