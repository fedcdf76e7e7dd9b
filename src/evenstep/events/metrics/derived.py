"""Metrics computed from metrics of all ranks, written and followed like any metric."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias, final

from evenstep.errors import TaskError, clause
from evenstep.events.metrics.pairs import Record

Derived: TypeAlias = Callable[[Mapping[str, float]], float]
Counts: TypeAlias = Mapping[tuple[int, str], float]
"""Counts under (update, name); the name "PLACE/" is the number of units of a place without a loss."""


@final
class DerivedMetrics:
    """Functions of other metrics, such as a perplexity, and of counts, in training and in each evaluation.

    Args:
        of_tasks: functions by name, by task; the task of a run with a single one is "".
        evaluating: tasks with an `evaluate` of their own, whose evaluations have other metrics than training. Their
            functions are left out where a metric that they ask for is missing.
    """

    def __init__(self, of_tasks: Mapping[str, Mapping[str, Derived]], *, evaluating: Collection[str] = ()) -> None:
        self._of_tasks = {task: functions for task, functions in of_tasks.items() if functions}
        self._evaluating = frozenset(evaluating)

    def __bool__(self) -> bool:
        return bool(self._of_tasks)

    def __call__(self, records: Sequence[Record], counts: Counts | None = None) -> list[Record]:
        """Derived records of `records` and `counts` of the same updates."""
        values: dict[tuple[int, str], dict[str, float]] = {}
        weights: dict[tuple[int, str], float] = {}
        for record in records:
            place, _, name = record.name.rpartition("/")
            values.setdefault((record.update, place), {})[name] = record.value
            if name == "loss":
                weights[record.update, place] = record.weight
        for (update, key), count in (counts or {}).items():
            place, _, name = key.rpartition("/")
            if name:
                values.setdefault((update, place), {})[name] = count
            else:
                weights.setdefault((update, place), count)
        return [
            Record(update, f"{place}/{name}", value, weights[update, place])
            for (update, place), metrics in values.items()
            if (update, place) in weights
            for name, value in self._at(place, metrics).items()
        ]

    def _at(self, place: str, metrics: dict[str, float]) -> dict[str, float]:
        task = "" if "" in self._of_tasks else place.rpartition("/")[2]
        found = {
            name: _value(name, function, metrics, may_lack=task in self._evaluating)
            for name, function in self._of_tasks.get(task, {}).items()
        }
        return {name: value for name, value in found.items() if value is not None}


def _value(name: str, function: Derived, metrics: Mapping[str, float], *, may_lack: bool) -> float | None:
    try:
        return float(function(metrics))
    except OverflowError:
        return math.inf
    except ZeroDivisionError:
        return math.nan  # a rate of nothing ends no run, and is never the best
    except Exception as error:
        if may_lack and isinstance(error, KeyError):
            return None
        raise TaskError(
            f"the derived metric `{name}` failed on the metrics {', '.join(metrics)}: {clause(error)}.", field=name
        ) from error


@final
class Throughput:
    """Units of weight, in all and per second, over windows of updates; computed from records.

        progress/tokens      Σ weights of all updates so far, for a task with `unit = "tokens"`; else progress/weight
        perf/tokens_per_s    Σ weights of the window's updates per second

    Args:
        losses: metrics whose weights are counted.
        unit: unit of the weights, such as "tokens".
    """

    def __init__(self, losses: Sequence[str] = (), unit: str = "weight") -> None:
        self._losses = frozenset(losses)
        self._unit = unit
        self.total = 0.0
        self.forget()

    def __call__(self, records: Sequence[Record]) -> list[Record]:
        """Records that follow from `records`, which come by update, and within an update in any order."""
        found: list[Record] = []
        # the time of a window may stand before the losses of its last update, which other ranks have put
        for update, name, value, weight in sorted(records, key=lambda one: (one.update, one.name not in self._losses)):
            if name in self._losses:
                self.total += weight
                self._weight += weight
                self._updates.add(update)
            elif name == "perf/update_s" and self._updates:
                seconds = value * len(self._updates)
                found.append(Record(update, f"progress/{self._unit}", self.total, 1.0))
                found.append(Record(update, f"perf/{self._unit}_per_s", self._weight / seconds, seconds))
                self.forget()
        return found

    def forget(self) -> None:
        """Begin a new window."""
        self._weight = 0.0
        self._updates = set[int]()
