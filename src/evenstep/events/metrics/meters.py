"""Metrics with a state of their own, such as torchmetrics' F1 or AUROC, over cuts, retries and ranks.

A meter sees each micro-batch, and is taken back to before an update that was given up, or an attempt that is repeated.
When metrics settle, the states of all ranks that have seen something are reduced as each metric defines, and computed.
`merge_state` of torchmetrics can't serve: it refuses most metrics, and its means depend on the order of ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor

from evenstep.errors import ArgumentError
from evenstep.events.metrics.series import Record

State: TypeAlias = dict[str, tuple[int, dict[str, Any]]]
"""Number of updates and values, by the path of a part of the metric."""


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """State of one rank's meter, on the CPU, and the key of its metric, without the prefix of its place.

    Args:
        later: the metric, if it is not one of those that all ranks were given.
    """

    key: str
    state: State
    later: Any = None


class _Snapshot(NamedTuple):
    update: int
    attempt: int
    state: State
    last: int | None


@final
@dataclass(slots=True)
class _Meter:
    key: str
    metric: Any
    last: int | None = None
    """Last update that it has seen."""
    before: list[_Snapshot] = field(default_factory=list[_Snapshot])

    def restore(self, place: int) -> None:
        snapshot = self.before[place]
        _set(self.metric, snapshot.state)
        self.last = snapshot.last
        del self.before[place:]


class Meters:
    """Meters of a run: one for each metric and place ("train/", "valid/").

    Args:
        metrics: metrics of torchmetrics, by key; they are copied.
    """

    def __init__(self, metrics: Mapping[str, Any] | None = None) -> None:
        self._metrics = dict(metrics or {})
        self._later: dict[str, Any] = {}
        self._meters: dict[str, _Meter] = {}
        self._attempt = 0

    def observe(self, prefix: str, key: str, values: Mapping[str, Any], *, update: int, later: Any = None) -> None:
        """Update the metric `key` at the place `prefix` with `values`; states keep copies, and no graph.

        Args:
            later: the metric, if it is not one of those that were given at first.
        """
        if later is not None:
            self._later.setdefault(key, later)
        elif key not in self._metrics:  # in a pass without metrics
            return
        meter = self._of(prefix, key)
        before = meter.before
        if not before or (before[-1].update, before[-1].attempt) != (update, self._attempt):
            if len(before) > 1 and before[-2].update == update:
                before.pop()  # needed: the state before the newest attempt, and before the update
            before.append(_Snapshot(update, self._attempt, _state(meter.metric), meter.last))
        lengths = {(path, name): len(value) for path, name, value in _lists(meter.metric)}
        meter.metric.update(**values)
        for path, name, kept in _lists(meter.metric):
            for place in range(lengths[path, name], len(kept)):
                kept[place] = kept[place].detach().clone()
        meter.last = update

    def begin_attempt(self) -> None:
        self._attempt += 1

    def drop_attempt(self) -> None:
        for meter in self._meters.values():
            if meter.before and meter.before[-1].attempt == self._attempt:
                meter.restore(-1)

    def discard_from(self, update: int) -> None:
        for meter in self._meters.values():
            place = next((place for place, one in enumerate(meter.before) if one.update >= update), None)
            if place is not None:
                meter.restore(place)

    def seen(self) -> dict[tuple[int, str], Seen]:
        return {
            (meter.last, name): Seen(
                meter.key, _moved(_state(meter.metric), torch.device("cpu")), self._later.get(meter.key)
            )
            for name, meter in self._meters.items()
            if meter.last is not None
        }

    def reset(self) -> None:
        for meter in self._meters.values():
            meter.metric.reset()
            meter.last = None
            meter.before.clear()

    def records(self, everybody: Sequence[Mapping[tuple[int, str], Any]]) -> list[Record]:
        """Values over all ranks, the same on each.

        Args:
            everybody: results of `seen`, by rank, among other things.

        Raises:
            ArgumentError: a metric computes something else than numbers.
        """
        found: dict[str, tuple[int, str, list[State]]] = {}
        for theirs in everybody:
            for (update, name), seen in theirs.items():
                if isinstance(seen, Seen):
                    if seen.later is not None:
                        self._later.setdefault(seen.key, seen.later)
                    last, key, states = found.get(name, (update, seen.key, []))
                    found[name] = max(last, update), key, [*states, seen.state]
        records: list[Record] = []
        for name, (update, key, states) in found.items():
            metric = self._of(name.removesuffix(key), key).metric
            _set(metric, _merged(metric, states))
            with torch.no_grad():
                value = metric.compute()
            metric.reset()
            records += [Record(update, full, number, 1.0) for full, number in _numbers(name, value)]
        return records

    def _of(self, prefix: str, key: str) -> _Meter:
        name = f"{prefix}{key}"
        if name not in self._meters:
            metric = deepcopy(self._later[key] if key in self._later else self._metrics[key])
            metric.reset()
            for part in _parts(metric).values():
                part.distributed_available_fn = _never  # states are reduced here
            self._meters[name] = _Meter(key, metric)
        return self._meters[name]


def _never() -> bool:
    return False


def _parts(metric: Any) -> dict[str, Any]:
    return {path: part for path, part in metric.named_modules() if hasattr(part, "metric_state")}


def _lists(metric: Any) -> Iterator[tuple[str, str, list[Tensor]]]:
    for path, part in _parts(metric).items():
        for name, value in part.metric_state.items():
            if isinstance(value, list):
                yield path, name, cast("list[Tensor]", value)


def _state(metric: Any) -> State:
    return {
        path: (part.update_count, {name: _kept(value) for name, value in part.metric_state.items()})
        for path, part in _parts(metric).items()
    }


def _set(metric: Any, state: State) -> None:
    for path, part in _parts(metric).items():
        count, values = _moved(state, part.device)[path]
        for name, value in values.items():
            setattr(part, name, _kept(value))
        part._update_count = count
        part._computed = None


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else list(value)


def _moved(state: State, device: torch.device) -> State:
    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else [one.to(device) for one in value]

    return {path: (count, {name: moved(one) for name, one in own.items()}) for path, (count, own) in state.items()}


def _merged(metric: Any, states: Sequence[State]) -> State:
    if len(states) == 1:
        return states[0]
    merged: State = {}
    for path, part in _parts(metric).items():
        values = {
            name: _reduced([state[path][1][name] for state in states], reduction)
            for name, reduction in part._reductions.items()
        }
        merged[path] = sum(state[path][0] for state in states), values
    return merged


def _reduced(values: Sequence[Any], reduction: Callable[[Any], Any] | None) -> Any:
    if isinstance(values[0], Tensor):
        stacked = torch.stack(list(values))
        return stacked if reduction is None else reduction(stacked)
    return [one for value in values for one in value]


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, one in cast("Mapping[str, Any]", value).items():
            yield from _numbers(f"{name}/{key}", one)
        return
    if isinstance(value, Tensor | float | int) and (not isinstance(value, Tensor) or value.numel() == 1):
        yield name, float(value)
        return
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ArgumentError(
        f"metric `{name}` must compute one number, or several by name, but computes {given}; average it, or use "
        f"torchmetrics' `ClasswiseWrapper`.",
        field=name,
    )
