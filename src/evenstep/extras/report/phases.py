"""Where an update's time goes: seconds of each phase, at each update where they were measured, and their shares.

What of the whole update no phase accounts for is the rest, where it is worth a word. Nothing is guessed: phases are the
metrics of their names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from evenstep.train.phases import PHASES

WHOLE, REST = "perf/update_s", "rest"
_BETWEEN = ("evaluate", "save")  # which the time of an update leaves out
_SMALL = 0.01  # of the whole: a rest that is left out, a phase that is shown with others
_COLORS = 8  # of the page: two phases of one colour would not be told apart
_NO_PHASE = ("update",)
_MOST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseShares:
    """The phases of a run's updates.

    Args:
        names: in the order of an update; "rest" last, if the whole was measured.
        updates: where they were measured; of very many, every so many.
        seconds: for each name, at each of these updates, as a mean since the last.
        means: over all of them, by name.
    """

    names: tuple[str, ...]
    updates: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    means: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the update, 0 to 1."""
        whole = sum(self.means)
        return tuple(mean / whole if whole else 0.0 for mean in self.means)


def phases(metrics: Mapping[str, Mapping[int, float]]) -> PhaseShares | None:
    """The phases that `metrics` hold, or None where there are none, or the updates were never timed.

    >>> found = phases({"perf/update_s": {10: 1.0}, "perf/data_s": {10: 0.25}, "perf/forward_s": {10: 0.5}})
    >>> found.names, found.means
    (('data', 'forward', 'rest'), (0.25, 0.5, 0.25))
    """
    named = {phase: values for name, values in metrics.items() if (phase := phase_of(name))}
    whole = metrics.get(WHOLE, {})
    updates = sorted(whole if whole else set[int]().union(*named.values()))
    if not named or not updates:
        return None
    names = sorted(named, key=lambda name: (PHASES.index(name) if name in PHASES else len(PHASES), name))
    columns = [tuple(_finite(named[name].get(update)) for update in updates) for name in names]
    if whole:
        within = [column for name, column in zip(names, columns, strict=True) if name not in _BETWEEN]
        sums = [sum(column) for column in zip(*within, strict=True)] or [0.0] * len(updates)
        rest = [max(_finite(whole[update]) - total, 0.0) for update, total in zip(updates, sums, strict=True)]
        if sum(rest) > _SMALL * sum(_finite(value) for value in whole.values()):
            names, columns = [*names, REST], [*columns, tuple(rest)]
    names, columns = _joined(names, columns)
    means = tuple(math.fsum(column) / len(column) for column in columns)
    each = math.ceil(len(updates) / _MOST)  # that make one point of the picture
    return PhaseShares(
        names=tuple(names),
        updates=tuple(updates[each - 1 :: each]),
        seconds=tuple(_means(column[: len(updates) // each * each], each) for column in columns),
        means=means,
    )


def phase_of(name: str) -> str:
    """The phase that a metric's seconds are of; "" of another metric.

    >>> phase_of("perf/data_s"), phase_of("perf/update_s"), phase_of("perf/box/data_s"), phase_of("time/save")
    ('data', '', '', 'save')
    """
    source, _, rest = name.partition("/")
    is_speed = source == "perf" and rest.endswith("_s") and not rest.endswith("_per_s")
    if "/" in rest or not (is_speed or source == "time"):
        return ""
    phase = rest.removesuffix("_s")
    return "" if phase in _NO_PHASE else phase


def _joined(names: list[str], columns: list[tuple[float, ...]]) -> tuple[list[str], list[tuple[float, ...]]]:
    """Phases that are hardly seen, or beyond the colours there are, become one, which names them, before the rest."""
    sums = {place: math.fsum(column) for place, column in enumerate(columns)}
    whole = math.fsum(sums.values())
    phases = sorted((place for place in sums if names[place] != REST), key=sums.__getitem__)
    beyond = phases[: len(phases) - _COLORS + 1] if len(phases) > _COLORS else []
    small = sorted({*beyond, *(place for place in phases if sums[place] < _SMALL * whole)})
    if len(small) < 2:
        return names, columns
    together = tuple(math.fsum(values) for values in zip(*(columns[place] for place in small), strict=True))
    kept = [place for place in range(len(names)) if place not in small]
    left = [*((names[place], columns[place]) for place in kept), (", ".join(names[place] for place in small), together)]
    left.sort(key=lambda one: one[0] == REST)
    return [name for name, _ in left], [column for _, column in left]


def _means(values: tuple[float, ...], each: int) -> tuple[float, ...]:
    return tuple(math.fsum(values[begin : begin + each]) / each for begin in range(0, len(values), each))


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) and value > 0 else 0.0
