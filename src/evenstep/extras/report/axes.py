"""What else than updates a curve can be drawn over: samples, tokens, and the time that training took.

Each is a count that grows with the updates, known at some of them; between two the page interpolates. Where a run keeps
no such count, samples and time are summed up from how fast it was.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

Points = list[tuple[int, float]]
_MOST = 500

AXES = ("updates", "samples", "tokens", "time")
_COUNTS = {"samples": ("progress/samples",), "tokens": ("progress/tokens",), "time": ("progress/time_s",)}


def axes(metrics: Mapping[str, Mapping[int, float]]) -> dict[str, Points]:
    """For each axis that is known, (update, count) by update, from (0, 0) on.

    >>> axes({"perf/update_s": {10: 0.5, 20: 1.0}, "perf/samples_per_s": {10: 8.0, 20: 4.0}})
    {'samples': [(0, 0.0), (10, 40.0), (20, 80.0)], 'time': [(0, 0.0), (10, 5.0), (20, 15.0)]}
    """
    found: dict[str, Points] = {}
    for axis, names in _COUNTS.items():
        values = next((metrics[name] for name in names if name in metrics), None)
        points = _growing(values) if values is not None else _from_speed(axis, metrics)
        if len(points) > 1:
            found[axis] = points[:: math.ceil(len(points) / _MOST)] + points[-1:]
    return {axis: _once(points) for axis, points in found.items()}


def _from_speed(axis: str, metrics: Mapping[str, Mapping[int, float]]) -> Points:
    """Sums over the windows in which seconds per update, and samples or tokens per second, were measured."""
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


def _once(points: Points) -> Points:
    return list(dict(points).items())
