"""Charts of the report: metrics of one quantity (`train/loss`, `valid/loss`) share axes, and so do several runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenstep.tools.report.figures import in_order

NUM_COLORS = 8
_RANKS = {"loss": 0, "grad_norm": 2, "lr": 3}
_OWN = ("perf", "mem", "time", "progress")  # of these each metric is a quantity of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line; None is a gap, where a value was not finite.

    Args:
        color: number of its colour; in one run each source has its own, in several each run.
        dash: number of its pattern, 0 for a line; in several runs each source has its own.
    """

    run: int
    label: str
    color: int
    dash: int
    updates: list[int]
    values: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart.

    Args:
        group: its heading, "" for the first.
        can_log: at least two values are above 0 and none below.
        notes: number of values that are not finite.
        curves: back to front.
    """

    title: str
    group: str
    can_log: bool
    notes: list[str]
    curves: list[Curve]


Metrics = Mapping[str, Mapping[int, float]]


def charts(runs: Sequence[tuple[str, Metrics]]) -> list[Chart]:
    """Charts of several runs, given by name."""
    families: dict[str, list[tuple[int, str]]] = {}
    for number, (_, metrics) in enumerate(runs):
        for name in metrics:
            families.setdefault(_title(name), []).append((number, name))
    others = sorted({_source(name) for _, metrics in runs for name in metrics} - {"train", *_OWN}, key=in_order)
    sources = {"train": 0, **dict.fromkeys(_OWN, NUM_COLORS - 1)}
    sources |= {source: 1 + index % (NUM_COLORS - 2) for index, source in enumerate(others)}
    return [_chart(title, families[title], runs, sources) for title in sorted(families, key=_rank)]


def _source(name: str) -> str:
    return name.partition("/")[0]


def _title(name: str) -> str:
    return name if _source(name) in _OWN else name.partition("/")[2] or name


def _group(title: str) -> str:
    return title.rpartition("/")[0].partition("/")[0]


def _rank(title: str) -> tuple[bool, bool, int, list[tuple[str, int]]]:
    group = _group(title)
    return bool(group), group in _OWN, _RANKS.get(title, 1), in_order(title)


def _chart(
    title: str, members: list[tuple[int, str]], runs: Sequence[tuple[str, Metrics]], sources: Mapping[str, int]
) -> Chart:
    curves: list[Curve] = []
    notes: list[str] = []
    finite: list[float] = []
    several = len(runs) > 1
    # evaluations are drawn over training
    for run, name in sorted(members, key=lambda each: (each[0], _source(each[1]) != "train", in_order(each[1]))):
        run_name, metrics = runs[run]
        label = name.rpartition("/")[2] if _source(name) in _OWN else name.removesuffix(f"/{title}")
        if several:
            is_alone = sum(number == run for number, _ in members) == 1 and _source(name) in ("train", *_OWN)
            label = run_name if is_alone else f"{run_name} {label}"
        broken = [update for update, value in metrics[name].items() if not math.isfinite(value)]
        if broken:
            notes.append(f"{label}: {len(broken):,} not finite, the first at update {broken[0]:,}")
        values = [float(f"{value:.6g}") if math.isfinite(value) else None for value in metrics[name].values()]
        finite += [value for value in values if value is not None]
        number = sources[_source(name)]
        curves.append(
            Curve(
                run=run,
                label=label,
                color=run % NUM_COLORS if several else number,
                dash=number % (NUM_COLORS - 1) if several else 0,
                updates=list(metrics[name]),
                values=values,
            )
        )
    can_log = sum(value > 0 for value in finite) > 1 and min(finite) >= 0
    return Chart(title=title, group=_group(title), can_log=can_log, notes=notes, curves=curves)
