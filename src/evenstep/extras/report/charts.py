"""Which curves share a chart, and their points as the page draws them.

Metrics that measure the same (`train/loss`, `valid/loss`) share axes; each `perf/` metric has its own, since their
units differ. A long noisy curve is drawn faintly with its mean over it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from evenstep.extras.report.thinning import MAX_STRETCHES, Point, smooth, thin

_RANKS = {"loss": 0, "grad_norm": 2, "lr": 3}
_SMOOTH_FROM = 200
_GREY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line: its points, a gap (None) where a value was not finite, and how it is drawn.

    Args:
        label: in the legend.
        color: number of its colour; a curve, its mean and all else of its source share one.
        faint: it is the noise behind a mean.
    """

    label: str
    color: int
    faint: bool
    updates: list[int]
    values: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart: its title, whether a logarithmic axis makes sense, and its curves.

    Args:
        title: what is measured.
        can_log: there are at least two values above 0 and none below.
        notes: what is not seen in the picture.
        curves: back to front.
    """

    title: str
    can_log: bool
    notes: list[str]
    curves: list[Curve]


def charts(metrics: Mapping[str, Mapping[int, float]]) -> list[Chart]:
    """One chart per family of metrics: the loss first, what has evaluations next, timings last."""
    families: dict[str, list[str]] = {}
    for name in metrics:
        families.setdefault(family(name), []).append(name)
    colors = _colors(metrics)
    return [
        _chart(title, {name: metrics[name] for name in families[title]}, colors)
        for title in sorted(families, key=_rank)
    ]


def family(name: str) -> str:
    """What a metric measures, which is also its chart's title.

    >>> family("valid/loss"), family("train/lr"), family("perf/samples_per_s"), family("score")
    ('loss', 'lr', 'perf/samples_per_s', 'score')
    """
    return name if name.startswith("perf/") else name.partition("/")[2] or name


def _rank(title: str) -> tuple[int, str]:
    return 4 if title.startswith("perf/") else _RANKS.get(title, 1), title


def _colors(names: Iterable[str]) -> dict[str, int]:
    """A colour for every source of metrics, the same in all charts: training, then each evaluation."""
    sources = sorted({_source(name) for name in names} - {"train", "perf"})
    return {"train": 0, "perf": _GREY} | {source: 1 + index % (_GREY - 1) for index, source in enumerate(sources)}


def _source(name: str) -> str:
    return name.partition("/")[0]


def _chart(title: str, metrics: Mapping[str, Mapping[int, float]], colors: Mapping[str, int]) -> Chart:
    curves: list[Curve] = []
    means: list[Curve] = []
    notes: list[str] = []
    # evaluations are drawn over training
    for name, values in sorted(metrics.items(), key=lambda item: (_source(item[0]) != "train", item[0])):
        points, color = list(values.items()), colors[_source(name)]
        label = name.removeprefix("perf/").removesuffix(f"/{title}")
        drawn = thin(points)
        if len(drawn) < len(points):
            notes.append(f"{label}: {len(points):,} values, drawn by the extremes of {MAX_STRETCHES} stretches")
        broken = [update for update, value in points if not math.isfinite(value)]
        if broken:
            notes.append(f"{label}: {len(broken):,} not finite, the first at update {broken[0]:,}")
        noisy = len(points) >= _SMOOTH_FROM and _changes_often(points)
        curves.append(_curve(label, color, drawn, faint=noisy))
        if noisy:
            half_width = len(points) // 100
            mean = smooth(points, half_width)
            means.append(_curve(f"{label}, mean of {2 * half_width + 1}", color, mean, faint=False))
    finite = [value for values in metrics.values() for value in values.values() if math.isfinite(value)]
    can_log = sum(value > 0 for value in finite) > 1 and min(finite) >= 0
    return Chart(title=title, can_log=can_log, notes=notes, curves=curves + means)


def _changes_often(points: list[Point]) -> bool:
    """Whether the curve turns around at more than a tenth of its points: then it is noise with a trend in it."""
    turns, rising = 0, None
    for (_, before), (_, after) in pairwise(points):
        if before != after:
            turns += rising is not None and rising != (after > before)
            rising = after > before
    return turns > len(points) / 10


def _curve(label: str, color: int, points: list[Point], *, faint: bool) -> Curve:
    return Curve(
        label=label,
        color=color,
        faint=faint,
        updates=[update for update, _ in points],
        values=[float(f"{value:.6g}") if math.isfinite(value) else None for _, value in points],
    )
