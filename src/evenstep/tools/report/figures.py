"""The figures on top of the page: what became of the run, and the last and best value of each loss and accuracy.

Which direction is better is told from the metric's name; where the name does not tell, no best is claimed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from evenstep.tools.report.run import ReportedRun, moment

_LOWER = re.compile(r"loss(?!_scale)|error|perplexity|ppl|bits|nll|\bmae|mse|\bwer\b|\bcer\b")
_HIGHER = re.compile(r"acc|f1|auc|bleu|precision|recall|top_?\d|\biou|score")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFigures:
    """A metric in numbers: its last value and, if there is a better direction, its best; with their updates."""

    name: str
    last: float
    last_update: int
    best: float | None
    best_update: int | None


def metric_figures(metrics: Mapping[str, Mapping[int, float]]) -> list[MetricFigures]:
    """The figures of all metrics: losses and accuracies before others, evaluations before training, losses first."""

    def rank(figures: MetricFigures) -> tuple[bool, bool, bool, bool, list[tuple[str, int]]]:
        name = figures.name
        where = name.startswith("perf/"), name.startswith("train/")
        return figures.best is None, *where, not name.endswith("/loss"), in_order(name)

    return sorted((_figures(name, values) for name, values in metrics.items() if values), key=rank)


def in_order(name: str) -> list[tuple[str, int]]:
    """By what names are sorted, so that numbers in them come as they count.

    >>> sorted(["blocks.10", "blocks.2", "a"], key=in_order)
    ['a', 'blocks.2', 'blocks.10']
    """
    return [(word, int(digits[:18] or -1)) for word, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def _figures(name: str, values: Mapping[int, float]) -> MetricFigures:
    last_update = max(values)
    finite = [(value, update) for update, value in values.items() if math.isfinite(value)]
    better = direction(name)
    best: tuple[float | None, int | None] = (None, None)
    if finite and better:
        # of equal ones the first
        best = min(finite, key=lambda pair: (better * pair[0], pair[1]))
    return MetricFigures(
        name=name,
        last=values[last_update],
        last_update=last_update,
        best=best[0],
        best_update=best[1],
    )


def direction(name: str) -> int:
    """1 if a lower value of the metric is better, -1 if a higher one is, 0 if its name does not tell.

    >>> direction("valid/loss"), direction("valid/top_5"), direction("train/loss_scale")
    (1, -1, 0)
    """
    if name.startswith("perf/"):
        return 0
    measure = name.lower().rpartition("/")[2]
    return 1 if _LOWER.search(measure) else -1 if _HIGHER.search(measure) else 0


def duration_s(run: ReportedRun) -> float | None:
    """Seconds from the run's last start to the last change of its status, or None if the status does not tell."""
    begin, end = moment(run.status.get("started")), moment(run.status.get("changed"))
    if begin is None or end is None or (begin.tzinfo is None) != (end.tzinfo is None):
        return None
    return (end - begin).total_seconds()


def spell_number(value: float) -> str:
    """Four significant digits.

    >>> spell_number(0.000123456), spell_number(21316.2), spell_number(2.0), spell_number(float("nan"))
    ('0.0001235', '21,320', '2', 'nan')
    """
    rounded = f"{value:.4g}"
    return f"{float(rounded):,.0f}" if 1e4 <= abs(value) < 1e9 else rounded


def spell_figure(value: float, name: str) -> str:
    """A metric's value: four significant digits, or a size if it counts bytes.

    >>> spell_figure(397_812_736.0, "perf/memory_peak_bytes"), spell_figure(0.25, "train/loss")
    ('397.8 MB', '0.25')
    """
    is_size = name.endswith("_bytes") and 0 <= value < 1e18
    return spell_bytes(round(value)) if is_size else spell_number(value)


def spell_duration(seconds: float) -> str:
    """The two largest units.

    >>> spell_duration(7.25), spell_duration(192), spell_duration(90_061)
    ('7.2 s', '3 min 12 s', '1 d 1 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    rest, words = round(seconds), list[str]()
    for unit, size in units:
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
