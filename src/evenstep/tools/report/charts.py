"""Charts and best values of metrics. Metrics of one quantity, as `train/loss` and `valid/loss`, share axes."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NUM_COLORS = 8
_RANKS = {"loss": 0, "grad_norm": 2, "lr": 3}
_OWN = ("perf", "mem", "time", "progress")  # metrics under these names share no chart
_LOWER = re.compile(r"loss(?!_scale)|error|perplexity|ppl|bits|nll|\bmae|mse|\bwer\b|\bcer\b")
_HIGHER = re.compile(r"acc|f1|auc|bleu|precision|recall|top_?\d|\biou|score")

Metrics = Mapping[str, Mapping[int, float]]
Chart = dict[str, Any]


class Figures(NamedTuple):
    """Last and, if the metric's name tells a direction, best value, with their updates."""

    last: float
    last_update: int
    best: float | None = None
    best_update: int = 0


def figures_of(metrics: Metrics) -> dict[str, Figures]:
    """Figures of all metrics: losses and accuracies before others, evaluations before training, losses first."""
    figures = {name: _figures(name, values) for name, values in metrics.items() if values}

    def rank(name: str) -> tuple[bool, bool, bool, bool, list[tuple[str, int]]]:
        where = name.startswith("perf/"), name.startswith("train/")
        return figures[name].best is None, *where, not name.endswith("/loss"), in_order(name)

    return {name: figures[name] for name in sorted(figures, key=rank)}


def _figures(name: str, values: Mapping[int, float]) -> Figures:
    last = max(values)
    better = direction(name)
    finite = [(better * value, update) for update, value in values.items() if math.isfinite(value)]
    if not better or not finite:
        return Figures(values[last], last)
    best = min(finite)[1]  # of equal values the first
    return Figures(values[last], last, values[best], best)


def direction(name: str) -> int:
    """1 if a lower value of the metric is better, -1 if a higher one is, 0 if its name does not tell."""
    if name.startswith("perf/"):
        return 0
    measure = name.lower().rpartition("/")[2]
    return 1 if _LOWER.search(measure) else -1 if _HIGHER.search(measure) else 0


def in_order(name: str) -> list[tuple[str, int]]:
    """Key that sorts names so that the numbers in them are in order."""
    return [(word, int(digits[:18] or -1)) for word, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def charts(runs: Sequence[tuple[str, Metrics]]) -> list[Chart]:
    """Charts of several runs, given by name, as the page's script reads them.

    Curves are back to front. In one run each source has a colour; in several each run has a colour, each source a dash.
    """
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
    curves: list[dict[str, Any]] = []
    notes: list[str] = []
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
        number = sources[_source(name)]
        curve = {
            "run": run,
            "label": label,
            "color": run % NUM_COLORS if several else number,
            "dash": number % (NUM_COLORS - 1) if several else 0,
            "updates": list(metrics[name]),
            "values": [float(f"{value:.6g}") if math.isfinite(value) else None for value in metrics[name].values()],
        }
        curves.append(curve)
    finite = [value for curve in curves for value in curve["values"] if value is not None]
    can_log = sum(value > 0 for value in finite) > 1 and min(finite) >= 0
    return {"title": title, "group": _group(title), "can_log": can_log, "notes": notes, "curves": curves}
