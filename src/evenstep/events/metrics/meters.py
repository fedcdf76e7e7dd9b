"""Metrics with a state, such as torchmetrics' F1 or AUROC, over micro-batches, retries and ranks.

`merge_state` of torchmetrics can't serve: it refuses most metrics, and its means depend on the order of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor

from evenstep.arguments import said
from evenstep.errors import ArgumentError
from evenstep.events.metrics.pairs import Record

State: TypeAlias = dict[str, tuple[int, dict[str, Any]]]
"""Number of updates and values, by the path of a part of the metric."""


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """State of one rank's meter, on the CPU, and the key of its metric, without the prefix of its place."""

    key: str
    state: State
    later: Any = None
    """The metric, if it is not one of those that all ranks were given."""


@final
class _Meter:
    def __init__(self, key: str, metric: Any) -> None:
        self.key = key
        self.metric = metric
        self.last: int | None = None  # last update that it has seen
        self.before: list[tuple[int, int, int | None, State]] = []  # update, attempt, `last` and state before it

    def restore(self, place: int) -> None:
        _, _, self.last, state = self.before[place]
        _set(self.metric, state)
        del self.before[place:]


class Meters:
    """Meters of a run: one for each metric and place ("train/", "valid/"), each a copy of the metric.

    A meter goes back to its earlier state when an update is given up or an attempt is repeated.
    """

    def __init__(self, metrics: Mapping[str, Any] | None = None) -> None:
        self._metrics = dict(metrics or {})
        self._later: dict[str, Any] = {}
        self._meters: dict[str, _Meter] = {}
        self._attempt = 0

    def observe(self, prefix: str, key: str, values: Mapping[str, Any], *, update: int, later: Any = None) -> None:
        """Update the metric `key` at the place `prefix` with `values`; states keep copies, and no graph."""
        if later is not None:
            self._later.setdefault(key, later)
        elif key not in self._metrics:  # in a pass without metrics
            return
        meter = self._of(prefix, key)
        before = meter.before
        if not before or before[-1][:2] != (update, self._attempt):
            if len(before) > 1 and before[-2][0] == update:
                before.pop()  # needed: the state before the newest attempt, and before the update
            before.append((update, self._attempt, meter.last, _state(meter.metric)))
        lengths = [len(kept) for kept in _lists(meter.metric)]
        meter.metric.update(**values)
        for kept, length in zip(_lists(meter.metric), lengths, strict=True):
            kept[length:] = [one.detach().clone() for one in kept[length:]]
        meter.last = update

    def begin_attempt(self) -> None:
        self._attempt += 1

    def drop_attempt(self) -> None:
        for meter in self._meters.values():
            if meter.before and meter.before[-1][1] == self._attempt:
                meter.restore(-1)

    def discard_from(self, update: int) -> None:
        for meter in self._meters.values():
            place = next((place for place, one in enumerate(meter.before) if one[0] >= update), None)
            if place is not None:
                meter.restore(place)

    def seen(self) -> dict[tuple[int, str], Seen]:
        return {
            (meter.last, name): Seen(meter.key, _state(meter.metric, torch.device("cpu")), self._later.get(meter.key))
            for name, meter in self._meters.items()
            if meter.last is not None
        }

    def reset(self) -> None:
        for meter in self._meters.values():
            meter.metric.reset()
            meter.last = None
            meter.before.clear()

    def records(self, everybody: Sequence[Mapping[tuple[int, str], Any]]) -> list[Record]:
        """Values over all ranks, the same on each, of the results of `seen` by rank, among other things."""
        found: dict[str, list[tuple[int, Seen]]] = {}
        for theirs in everybody:
            for (update, name), seen in theirs.items():
                if isinstance(seen, Seen):
                    if seen.later is not None:
                        self._later.setdefault(seen.key, seen.later)
                    found.setdefault(name, []).append((update, seen))
        records: list[Record] = []
        for name, each in found.items():
            key = each[0][1].key
            metric = self._of(name.removesuffix(key), key).metric
            _set(metric, _merged(metric, [seen.state for _, seen in each]))
            with torch.no_grad():
                value = metric.compute()
            metric.reset()
            last = max(update for update, _ in each)
            records += [Record(last, full, number, 1.0) for full, number in _numbers(name, value)]
        return records

    def _of(self, prefix: str, key: str) -> _Meter:
        name = f"{prefix}{key}"
        if name not in self._meters:
            metric = deepcopy(self._later[key] if key in self._later else self._metrics[key])
            metric.reset()
            for part in _parts(metric).values():
                part.distributed_available_fn = bool  # False: states are reduced here
            self._meters[name] = _Meter(key, metric)
        return self._meters[name]


def _parts(metric: Any) -> dict[str, Any]:
    return {path: part for path, part in metric.named_modules() if hasattr(part, "metric_state")}


def _lists(metric: Any) -> list[list[Tensor]]:
    values = [value for part in _parts(metric).values() for value in part.metric_state.values()]
    return [cast("list[Tensor]", value) for value in values if isinstance(value, list)]


def _state(metric: Any, device: torch.device | None = None) -> State:
    return {
        path: (part.update_count, {name: _copied(value, device) for name, value in part.metric_state.items()})
        for path, part in _parts(metric).items()
    }


def _set(metric: Any, state: State) -> None:
    for path, part in _parts(metric).items():
        count, values = state[path]
        for name, value in values.items():
            setattr(part, name, _copied(value, part.device))
        part._update_count = count
        part._computed = None


def _copied(value: Any, device: torch.device | None) -> Any:
    """A tensor's copy, or a list of tensors, which no metric writes to; on `device` if given."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return list(value) if device is None else [one.to(device) for one in value]


def _merged(metric: Any, states: Sequence[State]) -> State:
    if len(states) == 1:
        return states[0]
    merged: State = {}
    for path, part in _parts(metric).items():
        values: dict[str, Any] = {}
        for name, reduction in part._reductions.items():
            each = [state[path][1][name] for state in states]
            if isinstance(each[0], Tensor):
                stacked = torch.stack(each)
                values[name] = stacked if reduction is None else reduction(stacked)
            else:
                values[name] = [one for value in each for one in value]
        merged[path] = sum(state[path][0] for state in states), values
    return merged


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, one in cast("Mapping[str, Any]", value).items():
            yield from _numbers(f"{name}/{key}", one)
        return
    try:
        yield name, float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"metric `{name}` must compute one number, or several by name, but computes {said(value)}; average it, or "
            f"use torchmetrics' `ClasswiseWrapper`.",
            field=name,
        ) from error
