"""Charts of the report: metrics of one measure (`train/loss`, `valid/loss`) share axes, and so do several runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenstep.tools.report.figures import in_order

_RANKS = {"loss": 0, "grad_norm": 2, "lr": 3}
_OWN = ("perf", "mem", "time", "progress")  # of these each metric is a measure of its own
NUM_COLORS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line: its points, a gap (None) where a value was not finite, and how it is drawn.

    Args:
        color: number of its colour; of one run each source has its own, of several each run.
        dash: number of its pattern, 0 for a line: of several runs each source has its own.
    """

    run: int
    label: str
    color: int
    dash: int
    updates: list[int]
    values: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart: its title, whether a logarithmic axis makes sense, and its curves.

    Args:
        group: under which heading it stands, "" for the first.
        can_log: there are at least two values above 0 and none below.
        notes: what is not seen in the picture.
        curves: back to front.
    """

    title: str
    group: str
    can_log: bool
    notes: list[str]
    curves: list[Curve]


Metrics = Mapping[str, Mapping[int, float]]


def charts(runs: Sequence[tuple[str, Metrics]]) -> list[Chart]:
    families: dict[str, dict[int, dict[str, Mapping[int, float]]]] = {}
    for number, (_, metrics) in enumerate(runs):
        for name, values in metrics.items():
            families.setdefault(family(name), {}).setdefault(number, {})[name] = values
    sources = _numbers(name for _, metrics in runs for name in metrics)
    names = [name for name, _ in runs]
    return [_chart(title, families[title], sources, names) for title in sorted(families, key=_rank)]


def family(name: str) -> str:
    return name if name.partition("/")[0] in _OWN else name.partition("/")[2] or name


def group_of(title: str) -> str:
    """The heading that a chart stands under."""
    return title.rpartition("/")[0].partition("/")[0]


def _rank(title: str) -> tuple[bool, bool, int, list[tuple[str, int]]]:
    group = group_of(title)
    return bool(group), group in _OWN, _RANKS.get(title, 1), in_order(title)


def _numbers(names: Iterable[str]) -> dict[str, int]:
    found = {_source(name) for name in names}
    others = sorted(found - {"train", *_OWN}, key=in_order)
    last = dict.fromkeys(_OWN, NUM_COLORS - 1)
    return {"train": 0} | last | {source: 1 + index % (NUM_COLORS - 2) for index, source in enumerate(others)}


def _source(name: str) -> str:
    return name.partition("/")[0]


def _chart(
    title: str,
    runs: Mapping[int, Mapping[str, Mapping[int, float]]],
    sources: Mapping[str, int],
    names: Sequence[str],
) -> Chart:
    curves: list[Curve] = []
    notes: list[str] = []
    several = len(names) > 1
    for run, metrics in runs.items():
        # evaluations are drawn over training
        for name, values in sorted(metrics.items(), key=lambda item: (_source(item[0]) != "train", in_order(item[0]))):
            number = sources[_source(name)]
            source = name.rpartition("/")[2] if _source(name) in _OWN else name.removesuffix(f"/{title}")
            label = source
            if several:
                is_alone = len(metrics) == 1 and _source(name) in ("train", *_OWN)
                label = names[run] if is_alone else f"{names[run]} {source}"
            broken = [update for update, value in values.items() if not math.isfinite(value)]
            if broken:
                notes.append(f"{label}: {len(broken):,} not finite, the first at update {broken[0]:,}")
            curves.append(
                Curve(
                    run=run,
                    label=label,
                    color=run % NUM_COLORS if several else number,
                    dash=number % (NUM_COLORS - 1) if several else 0,
                    updates=list(values),
                    values=[_short(value) if math.isfinite(value) else None for value in values.values()],
                )
            )
    finite = [
        value
        for metrics in runs.values()
        for values in metrics.values()
        for value in values.values()
        if math.isfinite(value)
    ]
    can_log = sum(value > 0 for value in finite) > 1 and min(finite) >= 0
    return Chart(title=title, group=group_of(title), can_log=can_log, notes=notes, curves=curves)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
