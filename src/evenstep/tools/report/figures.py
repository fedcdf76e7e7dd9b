"""Last and best value of each metric, and how numbers are spelled.

The metric's name tells which direction is better; where it does not, there is no best value.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_LOWER = re.compile(r"loss(?!_scale)|error|perplexity|ppl|bits|nll|\bmae|mse|\bwer\b|\bcer\b")
_HIGHER = re.compile(r"acc|f1|auc|bleu|precision|recall|top_?\d|\biou|score")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFigures:
    """Last and, if a direction is better, best value of a metric, with their updates."""

    name: str
    last: float
    last_update: int
    best: float | None = None
    best_update: int = 0


def metric_figures(metrics: Mapping[str, Mapping[int, float]]) -> list[MetricFigures]:
    """Figures of all metrics: losses and accuracies before others, evaluations before training, losses first."""

    def rank(figures: MetricFigures) -> tuple[bool, bool, bool, bool, list[tuple[str, int]]]:
        name = figures.name
        where = name.startswith("perf/"), name.startswith("train/")
        return figures.best is None, *where, not name.endswith("/loss"), in_order(name)

    return sorted((_figures(name, values) for name, values in metrics.items() if values), key=rank)


def in_order(name: str) -> list[tuple[str, int]]:
    """Sorts names so that the numbers in them are in order.

    >>> sorted(["blocks.10", "blocks.2", "a"], key=in_order)
    ['a', 'blocks.2', 'blocks.10']
    """
    return [(word, int(digits[:18] or -1)) for word, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def _figures(name: str, values: Mapping[int, float]) -> MetricFigures:
    last = max(values)
    better = direction(name)
    finite = [(better * value, update) for update, value in values.items() if math.isfinite(value)]
    if not better or not finite:
        return MetricFigures(name=name, last=values[last], last_update=last)
    best = min(finite)[1]  # of equal values the first
    return MetricFigures(name=name, last=values[last], last_update=last, best=values[best], best_update=best)


def direction(name: str) -> int:
    """1 if a lower value of the metric is better, -1 if a higher one is, 0 if its name does not tell.

    >>> direction("valid/loss"), direction("valid/top_5"), direction("train/loss_scale")
    (1, -1, 0)
    """
    if name.startswith("perf/"):
        return 0
    measure = name.lower().rpartition("/")[2]
    return 1 if _LOWER.search(measure) else -1 if _HIGHER.search(measure) else 0


def spell_figure(value: float, name: str = "") -> str:
    """Four significant digits, or a size if the metric counts bytes.

    >>> spell_figure(397_812_736.0, "perf/memory_peak_bytes"), spell_figure(0.000123456), spell_figure(21316.2)
    ('397.8 MB', '0.0001235', '21,320')
    """
    if name.endswith("_bytes") and 0 <= value < 1e18:
        return spell_bytes(round(value))
    rounded = f"{value:.4g}"
    return f"{float(rounded):,.0f}" if 1e4 <= abs(value) < 1e9 else rounded


def spell_duration(seconds: float) -> str:
    """The two largest units.

    >>> spell_duration(7.25), spell_duration(192), spell_duration(90_061)
    ('7.2 s', '3 min 12 s', '1 d 1 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    words: list[str] = []
    rest = round(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or words:
            words.append(f"{count} {unit}")
    return " ".join(word for word in words[:2] if not word.startswith("0 "))


def spell_bytes(count: int) -> str:
    """Decimal units.

    >>> spell_bytes(999), spell_bytes(12_345_678)
    ('999 B', '12.3 MB')
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
