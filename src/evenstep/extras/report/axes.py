"""What else than updates a curve can be drawn over: samples, tokens (or what a run counts), and time.

Each is a count that grows with the updates, known at some of them; between two the page interpolates. They are metrics
of the run (`progress/…`, and `perf/time`, of which the pauses between two starts are taken out). Of a run that keeps
none, samples and time are summed up from how fast it was.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from evenstep.extras.report.run import ReportedRun, moment

Points = list[tuple[int, float]]
_MOST = 500
_CLOCK, _PROGRESS = "perf/time", "progress/"


def is_axis(metric: str) -> bool:
    """Whether a metric is there to be an axis, and says nothing as a curve.

    >>> is_axis("progress/tokens"), is_axis("perf/update_s")
    (True, False)
    """
    return metric == _CLOCK or metric.startswith(_PROGRESS)


def names_of_axes(runs: Iterable[ReportedRun]) -> list[str]:
    """Updates, samples, what else the runs count, time; "tokens" where they count nothing else."""
    counted = {name.removeprefix(_PROGRESS) for run in runs for name in run.metrics if name.startswith(_PROGRESS)}
    return ["updates", "samples", *(sorted(counted - {"samples"}) or ["tokens"]), "time"]


def axes(run: ReportedRun) -> dict[str, Points]:
    """For each axis that is known, (update, count) by update; time in seconds.

    >>> from pathlib import Path
    >>> metrics = {"perf/update_s": {10: 0.5, 20: 1.0}, "perf/samples_per_s": {10: 8.0, 20: 4.0}}
    >>> axes(ReportedRun(folder=Path("a"), metrics=metrics))
    {'samples': [(0, 0.0), (10, 40.0), (20, 80.0)], 'time': [(0, 0.0), (10, 5.0), (20, 15.0)]}
    """
    metrics = run.metrics
    found = {name.removeprefix(_PROGRESS): _growing(metrics[name]) for name in metrics if name.startswith(_PROGRESS)}
    found.setdefault("samples", _from_speed("samples", metrics))
    found["time"] = _elapsed(run) if _CLOCK in metrics else _from_speed("time", metrics)
    return {axis: _fewer(points) for axis, points in found.items() if len(points) > 1}


def _elapsed(run: ReportedRun) -> Points:
    """Seconds since the run was started first, but for those in which it did not run."""
    clock = [(update, seconds) for update, seconds in run.metrics[_CLOCK].items() if math.isfinite(seconds)]
    known = [(one.update, began.timestamp()) for one in run.starts if (began := moment(one.time)) is not None]
    if not clock:
        return []
    if not known or known[0][1] > clock[0][1]:
        first_update, first_clock = clock[0]
        known.insert(0, (0, first_clock - first_update * run.metrics.get("perf/update_s", {}).get(first_update, 0.0)))
    points: Points = [(0, 0.0)]
    for place, (_, began) in enumerate(known):
        until = known[place + 1][1] if place + 1 < len(known) else math.inf
        before = points[-1][1]
        points += [
            (update, round(before + seconds - began, 3)) for update, seconds in clock if began <= seconds < until
        ]
    return _growing(dict(points))


def _from_speed(axis: str, metrics: Mapping[str, Mapping[int, float]]) -> Points:
    """Sums over the windows in which seconds per update, and samples per second, were measured."""
    seconds = metrics.get("perf/update_s", {})
    speed = metrics.get(f"perf/{axis}_per_s", {})
    points: Points = [(0, 0.0)]
    for (before, _), (update, each_s) in pairwise([(0, 0.0), *sorted(seconds.items())]):
        per_s = 1.0 if axis == "time" else speed.get(update, math.nan)
        grown = (update - before) * each_s * per_s
        if not math.isfinite(grown):
            return []
        points.append((update, float(f"{points[-1][1] + grown:.9g}")))
    return points


def _growing(values: Mapping[int, float]) -> Points:
    points: Points = [(0, 0.0)]
    for update, value in sorted(values.items()):
        if update > points[-1][0] and math.isfinite(value) and value >= points[-1][1]:
            points.append((update, value))
    return points


def _fewer(points: Sequence[tuple[int, float]]) -> Points:
    every = math.ceil(len(points) / _MOST)
    return list(dict([*points[::every], points[-1]]).items())
