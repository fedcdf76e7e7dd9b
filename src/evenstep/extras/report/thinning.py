"""Fewer points for the same picture: long series are thinned for drawing, without losing a peak.

A series is cut into as many equal stretches of updates as a chart has pixels, and of each stretch the first, lowest,
highest and last point are kept. This is for drawing only: figures are taken from all points.
"""

import math
from collections.abc import Sequence

Point = tuple[int, float]

MAX_STRETCHES = 500


def thin(points: Sequence[Point], stretches: int = MAX_STRETCHES) -> list[Point]:
    """The points that make the picture: at most five of each stretch, all of them if there are few.

    Args:
        points: (update, value) by update; values may be inf or nan, of which one per stretch stays as a gap.
        stretches: how many pixels there are.

    >>> thin([(update, float(update == 500)) for update in range(1000)], stretches=2)
    [(0, 0.0), (499, 0.0), (500, 1.0), (501, 0.0), (999, 0.0)]
    """
    if len(points) <= 4 * stretches:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first + 1) / stretches
    kept: list[Point] = []
    begin = 0
    while begin < len(points):
        stretch_end = first + (int((points[begin][0] - first) / width) + 1) * width
        end = begin + 1
        while end < len(points) and points[end][0] < stretch_end:
            end += 1
        kept += _of_stretch(points[begin:end])
        begin = end
    return kept


def smooth(points: Sequence[Point], half_width: int, num_points: int = MAX_STRETCHES) -> list[Point]:
    """The mean of a point with its neighbours, at about `num_points` evenly chosen points.

    Args:
        points: (update, value) by update; those that are not finite are left out.
        half_width: neighbours to each side. Near the begin there are as few after as before, so that a steep fall
            is not flattened; near the end there are only fewer after, so that the mean does not end in noise.
        num_points: how many means to give at most, besides the last.

    >>> smooth([(1, 4.0), (2, 1.0), (3, 1.0), (4, 4.0)], half_width=1)
    [(1, 4.0), (2, 2.0), (3, 2.0), (4, 2.5)]
    """
    finite = [point for point in points if math.isfinite(point[1])]
    smoothed: list[Point] = []
    for index in {*range(0, len(finite), math.ceil(len(finite) / num_points) or 1), len(finite) - 1} if finite else ():
        reach = min(half_width, index)
        window = finite[index - reach : index + reach + 1]
        # a sum per window: with running sums one huge value would drown all that follow it
        smoothed.append((finite[index][0], math.fsum(value for _, value in window) / len(window)))
    return sorted(smoothed)


def _of_stretch(points: Sequence[Point]) -> list[Point]:
    finite = [point for point in points if math.isfinite(point[1])]
    kept = {point for point in points if not math.isfinite(point[1])}
    kept = {min(kept)} if kept else kept
    if finite:
        kept |= {finite[0], finite[-1], min(finite, key=_value), max(finite, key=_value)}
    return sorted(kept)


def _value(point: Point) -> float:
    return point[1]
