"""Fewer points for the same picture: long series are thinned for drawing, without losing a peak.

A series is cut into as many equal stretches of updates as a chart has pixels, and of each stretch the first, lowest,
highest and last point are kept; for smoothing, the mean of each. This is for drawing only: figures are taken from all
points.
"""

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter

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
    return [point for stretch in _stretches(points, stretches) for point in _of_stretch(stretch)]


def means(points: Sequence[Point], stretches: int = MAX_STRETCHES) -> list[tuple[float, float, int]]:
    """Of each stretch: the mean of its updates, the mean of its finite values, and how many those are.

    >>> means([(1, 4.0), (2, 2.0), (3, float("nan")), (4, 1.0)], stretches=2)
    [(1.5, 3.0, 2), (4.0, 1.0, 1)]
    """
    found: list[tuple[float, float, int]] = []
    for stretch in _stretches(points, stretches):
        finite = [point for point in stretch if math.isfinite(point[1])]
        if finite:
            # divided first, so that the sum of large values does not overflow
            mean = math.fsum(value / len(finite) for _, value in finite)
            found.append((sum(update for update, _ in finite) / len(finite), mean, len(finite)))
    return found


def _stretches(points: Sequence[Point], stretches: int) -> Iterator[Sequence[Point]]:
    first, last = points[0][0], points[-1][0]
    width = (last - first + 1) / stretches
    begin = 0
    while begin < len(points):
        stretch_end = first + (int((points[begin][0] - first) / width) + 1) * width
        end = begin + 1
        while end < len(points) and points[end][0] < stretch_end:
            end += 1
        yield points[begin:end]
        begin = end


def _of_stretch(points: Sequence[Point]) -> list[Point]:
    finite = [point for point in points if math.isfinite(point[1])]
    kept = {point for point in points if not math.isfinite(point[1])}
    kept = {min(kept)} if kept else kept
    if finite:
        kept |= {finite[0], finite[-1], min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))}
    return sorted(kept)
