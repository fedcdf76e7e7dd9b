"""Metrics of a run as pairs (sum, weight): kept on their devices until they are read, then averaged and remembered."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from math import fsum
from operator import itemgetter
from typing import Any, final

from torch import Tensor

from evenstep.errors import ArgumentError, LostRankError
from evenstep.events.metrics.derived import DerivedMetrics, Throughput
from evenstep.events.metrics.meters import Meters
from evenstep.events.metrics.pairs import COUNT, Entry, Number, Pairs, Record, copied, joined, means, pairs_of
from evenstep.events.shown import Shown, Value

_NORM = "train/grad_norm"
_CLIPPED = "train/clipped"
_TOTAL = "progress/weight"
"""Key in a saved state: Σ weights of all updates."""
KEPT_VALUES = 1000
"""Newest values of each metric that are remembered and saved; files keep all."""


@final
class Storage:
    """Metrics of a run: pending pairs, and the history of values.

    Args:
        meters, derived, throughput: metrics with a state, and those computed from others.
        clip_norm: norm above which gradients are clipped; train/clipped is then 1 for a clipped update, else 0.

    >>> import torch
    >>> storage = Storage()
    >>> storage.put("train/loss", torch.tensor(6.0), 2, update=1)
    >>> storage.put("train/loss", 3.0, 1, update=1)
    >>> storage.settle()
    [Record(update=1, name='train/loss', value=3.0, weight=3.0)]
    """

    def __init__(
        self,
        *,
        meters: Meters | None = None,
        derived: DerivedMetrics | None = None,
        throughput: Throughput | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self._pending: list[Entry] = []
        self._shown: list[Shown] = []
        self._history: dict[str, list[Record]] = {}
        self._meters = meters or Meters()
        self._derived = derived or DerivedMetrics({})
        self._clip_norm = clip_norm
        self.throughput = throughput or Throughput()
        self.settled = 0  # times
        self.observe = self._meters.observe

    def put(self, name: str, sum: Number, weight: Number = 1.0, *, update: int) -> None:
        """Add a sum and its weight to metric `name` at `update`. A metric whose weights add up to 0 is left out.

        Tensors are copied without their graph, so that later changes do not show. No accelerator is waited for.

        Args:
            sum: sum over the units: a number or a 0-dim tensor.
            weight: number of units, at least 0; 1 for a plain value, such as a learning rate.
        """
        self._pending.append((update, name, copied(sum, name), copied(weight, name)))

    def count(self, name: str, count: Number, *, update: int) -> None:
        """Add to the count `name`, such as "valid/matches", an input of derived metrics that is not written itself."""
        self.put(f"{COUNT}{name}", count, 0.0, update=update)

    def show(self, name: str, value: Value, *, update: int) -> None:
        """Give writers a text or an image with the next metrics; the first of one name is kept."""
        shown = Shown(update=update, name=name, value=value)
        if shown not in self._shown:  # equal: of the same update and name
            self._shown.append(shown)

    def take_shown(self) -> list[Shown]:
        shown = self._shown
        self._shown = []
        return shown

    def follow(self, settled: int) -> None:
        """Drop pending pairs if other ranks have read theirs while this rank was disconnected."""
        if self.settled < settled:
            self._pending.clear()
            self._meters.reset()
        self.settled = settled

    def discard_from(self, update: int) -> None:
        """Drop pending metrics of `update` and later ones, which were given up."""
        self._pending[:] = [entry for entry in self._pending if entry[0] < update]
        self._shown[:] = [one for one in self._shown if one.update < update]
        self._meters.discard_from(update)

    def mark(self) -> tuple[int, int]:
        """Begin an attempt; returns a mark for `drop_after`, which is valid until the next."""
        self._meters.begin_attempt()
        return len(self._pending), len(self._shown)

    def drop_after(self, mark: tuple[int, int]) -> None:
        """Drop metrics since `mark`, because the attempt is repeated."""
        pending, shown = mark
        del self._pending[pending:]
        del self._shown[shown:]
        self._meters.drop_attempt()

    def pending(self, name: str, *, update: int) -> list[Tensor | float]:
        """Pending sums and weights of metric `name` at `update`, in turn."""
        return [one for entry in self._pending if entry[:2] == (update, name) for one in entry[2:]]

    def settle(self, gather: Callable[[Pairs], list[Pairs]] = lambda pairs: [pairs]) -> list[Record]:
        """Read and remember all pending metrics; records come by update, then in the order first put.

        All ranks get the same records. A meter's record is at the last update that any rank's meter has seen.

        Args:
            gather: collects the pairs of all ranks, by rank. If it loses a rank, everything stays pending.
        """
        pending = self._pending.copy()
        self._pending.clear()
        pairs = pairs_of(pending)
        if self._clip_norm is not None:
            norms = [(update, pair[0]) for (update, name), pair in pairs.items() if name == _NORM]
            pairs |= {(update, _CLIPPED): (float(norm > self._clip_norm), 1.0) for update, norm in norms}
        pairs.update(self._meters.seen())
        try:
            everybody = gather(pairs)
        except LostRankError:
            self._pending[:0] = pending
            raise
        self._meters.reset()
        self.settled += 1
        summed = joined(everybody)
        records = means(summed) + self._meters.records(everybody)
        if self._derived:
            counts = {(update, key[1:]): fsum(pair[::2]) for (update, key), pair in summed.items() if key[:1] == COUNT}
            records += self._derived(records, counts)
        records.sort(key=itemgetter(0))
        records += self.throughput(records)
        records.sort(key=itemgetter(0))
        self._remember(records)
        return records

    def names(self) -> tuple[str, ...]:
        """Metrics that have a history, in the order of their first values."""
        return tuple(self._history)

    def history(self, name: str) -> list[Record]:
        """Newest values of metric `name`, by update; empty if it never came."""
        return self._history.get(name, [])[-KEPT_VALUES:]

    def latest(self, name: str) -> Record | None:
        """Last value of metric `name`, or None if it never came."""
        return next(reversed(self._history.get(name, [])), None)

    def values_before(self, update: int, name: str, count: int) -> list[float]:
        """Last `count` values of metric `name` at updates before `update`, or as many as there are."""
        known = self._history.get(name, [])
        end = bisect_left(known, update, key=itemgetter(0))
        return [record.value for record in known[max(0, end - count) : end]]

    def state_dict(self) -> dict[str, Any]:
        """Newest values of every metric; without times (`perf/…`), which differ between equal runs."""
        state: dict[str, Any] = {}
        for name in self._history:
            if not name.startswith(("perf/", "progress/")):
                records = self.history(name)
                state[name] = [[getattr(one, column) for one in records] for column in ("update", "value", "weight")]
        return {**state, _TOTAL: self.throughput.total} if self.throughput.total else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved history; pending metrics are dropped."""
        self._pending.clear()
        self._shown.clear()
        self._meters.reset()
        self.throughput.forget()
        self.throughput.total = state.get(_TOTAL, 0.0)
        self._history = {
            name: [Record(update, name, value, weight) for update, value, weight in zip(*columns, strict=True)]
            for name, columns in state.items()
            if name != _TOTAL
        }

    def _remember(self, records: Iterable[Record]) -> None:
        for record in records:
            name = record.name
            if not name.isprintable() or name in ("", "update"):
                raise ArgumentError(
                    f"a metric's name must be printable and not `update`, but is {name!r}; rename it.", field=name
                )
            known = self._history.setdefault(name, [])
            known.insert(bisect_right(known, record.update, key=itemgetter(0)), record)  # it may come late
            if len(known) > 2 * KEPT_VALUES:
                del known[:-KEPT_VALUES]
