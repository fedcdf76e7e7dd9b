"""Metrics with a state of their own, such as torchmetrics' F1 or AUROC, beside those that are pairs (sum, weight).

A meter is updated with what each micro-batch shows it, and can be taken back to before an update that was given up, or
a try that is made again. When metrics settle, the ranks' states are gathered once, reduced as each says, computed,
and set back; ranks that have seen nothing are left out. It knows torchmetrics' objects by their shape alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor

from evenstep.errors import ArgumentError
from evenstep.events.series import Record

State: TypeAlias = dict[str, tuple[int, dict[str, Any]]]  # update count and values, by part of the metric


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank's meter has seen since it was last set back.

    Args:
        key: of the metric, without the prefix of where it was seen.
        state: on the CPU.
    """

    key: str
    state: State


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
    last: int | None = None  # the last update that it has seen
    before: list[_Snapshot] = field(default_factory=list[_Snapshot])

    def back(self, place: int) -> None:
        one = self.before[place]
        _set(self.metric, one.state)
        self.last = one.last
        del self.before[place:]


class Meters:
    """The meters of a run, one for each place where a metric is seen ("train/", "valid/").

    Args:
        metrics: objects of torchmetrics' interface, by key; these are copied and stay as they are.
    """

    def __init__(self, metrics: Mapping[str, Any] | None = None) -> None:
        self._metrics = dict(metrics or {})
        self._meters: dict[str, _Meter] = {}
        self._attempt = 0

    def observe(self, prefix: str, key: str, values: Mapping[str, Any], *, update: int) -> None:
        if key not in self._metrics:  # of a pass that counts nowhere
            return
        meter = self._of(prefix, key)
        before = meter.before
        if not before or (before[-1].update, before[-1].attempt) != (update, self._attempt):
            if len(before) > 1 and before[-2].update == update:
                before.pop()  # only the newest try can be taken back by itself, and the whole update by its first
            before.append(_Snapshot(update, self._attempt, _state(meter.metric), meter.last))
        meter.metric.update(**values)
        meter.last = update

    def begin_attempt(self) -> None:
        self._attempt += 1

    def drop_attempt(self) -> None:
        for meter in self._meters.values():
            if meter.before and meter.before[-1].attempt == self._attempt:
                meter.back(-1)

    def discard_from(self, update: int) -> None:
        for meter in self._meters.values():
            place = next((place for place, one in enumerate(meter.before) if one.update >= update), None)
            if place is not None:
                meter.back(place)

    def seen(self) -> dict[tuple[int, str], Seen]:
        return {
            (meter.last, name): Seen(meter.key, _moved(_state(meter.metric), torch.device("cpu")))
            for name, meter in self._meters.items()
            if meter.last is not None
        }

    def reset(self) -> None:
        for meter in self._meters.values():
            meter.metric.reset()
            meter.last = None
            meter.before.clear()

    def records(self, everybody: Sequence[Mapping[tuple[int, str], Any]]) -> list[Record]:
        """What all ranks have seen together, computed; the same on each.

        Args:
            everybody: what `seen` gave, by rank, among other things.

        Raises:
            ArgumentError: a metric computes something else than numbers.
        """
        if not self._metrics:
            return []
        found: dict[str, tuple[int, str, list[State]]] = {}
        for theirs in everybody:
            for (update, name), seen in theirs.items():
                if type(seen) is not Seen:
                    continue
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
            metric = deepcopy(self._metrics[key])
            metric.reset()
            for part in _parts(metric).values():
                part.sync_on_compute = part._to_sync = False  # the ranks' states are reduced here, once
            self._meters[name] = _Meter(key, metric)
        return self._meters[name]


def _parts(metric: Any) -> dict[str, Any]:
    return {path: part for path, part in metric.named_modules() if hasattr(part, "_reductions")}


def _state(metric: Any) -> State:
    return {
        path: (part._update_count, {name: _kept(getattr(part, name)) for name in part._reductions})
        for path, part in _parts(metric).items()
    }


def _set(metric: Any, state: State) -> None:
    for path, part in _parts(metric).items():
        count, values = _moved(state, part.device)[path]
        for name, value in values.items():
            setattr(part, name, _kept(value))
        part._update_count, part._computed = count, None


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
    return [one for value in values for one in value]  # in lists nothing but what a single process would hold


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, one in cast("Mapping[str, Any]", value).items():
            yield from _numbers(f"{name}/{key}", one)
        return
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ArgumentError(
            f"metric `{name}` must compute one number, but computes a tensor of shape {list(value.shape)}; let it "
            f"average, or wrap it in torchmetrics' `ClasswiseWrapper`, which names each.",
            field=name,
        )
    if not isinstance(value, Tensor | float | int):
        raise ArgumentError(f"metric `{name}` must compute one number, or several by name, but computes {value!r}.")
    yield name, float(value)
