"""Metrics that are functions of others, such as a perplexity of a mean loss: exp(Σ loss / Σ weight), no mean of exps.

They are made of settled values, Σ sums / Σ weights over micro-batches and ranks, and are then metrics as any: written,
remembered, and followed by whoever follows one. Where a place has no loss nothing is derived.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

from evenstep.errors import TaskError, clause
from evenstep.events.series import Record

Derived: TypeAlias = Callable[[Mapping[str, float]], float]


@final
class DerivedMetrics:
    """What is derived of the metrics of each task, in training and in each evaluation.

    Args:
        of_tasks: the functions by name, by the task's name; "" is that of a run with one task without a name.

    >>> derived = DerivedMetrics({"": {"ppl": lambda metrics: math.exp(metrics["loss"])}})
    >>> derived([Record(3, "valid/loss", 0.0, 8.0)])
    [Record(update=3, name='valid/ppl', value=1.0, weight=8.0)]
    """

    def __init__(self, of_tasks: Mapping[str, Mapping[str, Derived]]) -> None:
        self._of_tasks = {task: functions for task, functions in of_tasks.items() if functions}

    def __bool__(self) -> bool:
        return bool(self._of_tasks)

    def __call__(self, records: Sequence[Record]) -> list[Record]:
        """What follows from `records`, all that were settled together.

        Raises:
            TaskError: a function raised, or gave no number.
        """
        places: dict[tuple[int, str], dict[str, Record]] = {}
        for record in records:
            place, _, name = record.name.rpartition("/")
            places.setdefault((record.update, place), {})[name] = record
        found: list[Record] = []
        for (update, place), known in places.items():
            functions = self._of_tasks.get("" if "" in self._of_tasks else place.rpartition("/")[2], {})
            if "loss" in known:
                metrics = {name: record.value for name, record in known.items()}
                weight = known["loss"].weight
                found += [Record(update, f"{place}/{n}", _value(n, of, metrics), weight) for n, of in functions.items()]
        return found


def _value(name: str, function: Derived, metrics: Mapping[str, float]) -> float:
    try:
        return float(function(metrics))
    except OverflowError:
        return math.inf
    except Exception as error:
        raise TaskError(
            f"the derived metric `{name}` could not be made of {', '.join(metrics)}: {clause(error)}; write a function "
            f"of these numbers by name, such as `lambda metrics: math.exp(metrics['loss'])`."
        ) from error
