"""Metrics that are functions of others, such as a perplexity of a mean loss: exp(Σ loss / Σ weight), no mean of exps.

They are made of settled values, Σ sums / Σ weights over micro-batches and ranks, and of counts, which are plain sums.
They are then metrics as any: written, remembered, and followed by whoever follows one. Where a place has neither a loss
nor counts nothing is derived.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias, final

from evenstep.errors import TaskError, clause
from evenstep.events.series import Record

Derived: TypeAlias = Callable[[Mapping[str, float]], float]
Counts: TypeAlias = Mapping[tuple[int, str], float]  # under (update, name)

_TRAINING = "train"  # what the names of its metrics begin with
_WEIGHT = ""  # the count that says how many units a place without a loss covers


@final
class DerivedMetrics:
    """What is derived of the metrics of each task, in training and in each evaluation.

    Args:
        of_tasks: the functions by name, by the task's name; "" is that of a run with one task without a name.
        evaluating: the tasks that evaluate by themselves, so that evaluations have other metrics than training; of
            these each metric is derived where all that it asks is there.

    >>> derived = DerivedMetrics({"": {"ppl": lambda metrics: math.exp(metrics["loss"])}})
    >>> derived([Record(3, "valid/loss", 0.0, 8.0)])
    [Record(update=3, name='valid/ppl', value=1.0, weight=8.0)]
    """

    def __init__(self, of_tasks: Mapping[str, Mapping[str, Derived]], *, evaluating: Collection[str] = ()) -> None:
        self._of_tasks = {task: functions for task, functions in of_tasks.items() if functions}
        self._evaluating = frozenset(evaluating)
        self._in_training: dict[str, set[str]] = {}  # what is there, by task

    def __bool__(self) -> bool:
        return bool(self._of_tasks)

    def __call__(self, records: Sequence[Record], counts: Counts | None = None) -> list[Record]:
        """What follows from `records` and `counts`, all that were settled together.

        Raises:
            TaskError: a function raised, or gave no number.
        """
        places: dict[tuple[int, str], dict[str, Record]] = {}
        for record in records:
            place, _, name = record.name.rpartition("/")
            places.setdefault((record.update, place), {})[name] = record
        sums: dict[tuple[int, str], dict[str, float]] = {}
        for (update, key), count in (counts or {}).items():
            place, _, name = key.rpartition("/")
            sums.setdefault((update, place), {})[name] = count
        found: list[Record] = []
        for update, place in dict.fromkeys((*places, *sums)):
            known, summed = places.get((update, place), {}), sums.get((update, place), {})
            weight = summed.pop(_WEIGHT, None)
            if "loss" in known:
                weight = known["loss"].weight
            if weight is not None and (known or summed):
                metrics = {name: record.value for name, record in known.items()} | summed
                values = self._at(place, metrics)
                found += [Record(update, f"{place}/{name}", value, weight) for name, value in values.items()]
        return found

    def _at(self, place: str, metrics: dict[str, float]) -> dict[str, float]:
        task = "" if "" in self._of_tasks else place.rpartition("/")[2]
        functions, own = self._of_tasks.get(task, {}), task in self._evaluating
        if own and place.partition("/")[0] == _TRAINING:
            self._in_training.setdefault(task, {"loss"}).update(metrics)
        values: dict[str, float] = {}
        for name, function in functions.items():
            asked = _Metrics(metrics)
            try:
                values[name] = _value(name, function, asked)
            except TaskError:
                if not own or not self._may_lack(task, place, asked.lacking):
                    raise
        return values

    def _may_lack(self, task: str, place: str, name: str | None) -> bool:
        if name is None or place.partition("/")[0] == _TRAINING:
            return name is not None
        return task not in self._in_training or name in self._in_training[task]


class _Metrics(dict[str, float]):
    lacking: str | None = None

    def __missing__(self, name: str) -> float:
        self.lacking = name
        raise KeyError(name)


def _value(name: str, function: Derived, metrics: Mapping[str, float]) -> float:
    try:
        return float(function(metrics))
    except OverflowError:
        return math.inf
    except ZeroDivisionError:
        return math.nan  # of nothing, such as errors of no words: it ends no run, and is never the best
    except Exception as error:
        raise TaskError(
            f"the derived metric `{name}` could not be made of {', '.join(metrics)}: {clause(error)}; write a function "
            f"of these numbers by name, such as `lambda metrics: math.exp(metrics['loss'])`.",
            field=name,
        ) from error
