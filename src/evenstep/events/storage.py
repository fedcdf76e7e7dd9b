"""Every metric of a run as a pair (sum, weight): kept on its device until asked for, then averaged and remembered.

Putting a value is one append; nothing waits for the device. Settling reads all that is pending with one copy per
device, adds pairs of the same name and update, Σ sums / Σ weights, never a mean of means, and gives the records to
whoever writes them. Sums are exact and rounded once, so a value does not depend on which rank has put what. It writes
nothing itself and knows no periods.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import fsum
from operator import itemgetter
from typing import Any, final

import torch
from torch import Tensor

from evenstep.errors import ArgumentError, LostRankError
from evenstep.events.derived import DerivedMetrics
from evenstep.events.meters import Meters
from evenstep.events.pairs import COUNT, Entry, Number, Pairs, joined, means, pairs_of
from evenstep.events.series import Record, Series
from evenstep.events.shown import Shown, Value
from evenstep.events.throughput import Throughput
from evenstep.tensors import scalar_on

_NORM, _CLIPPED = "train/grad_norm", "train/clipped"
_TOTAL = "progress/weight"  # of all updates, in a saved state


def _alone(pairs: Pairs) -> list[Pairs]:
    return [pairs]


@final
class Storage:
    """The metrics of a run: pending pairs, and the history of settled values.

    Args:
        history_updates: values kept per metric (one per update); older ones are forgotten here, not in the files.
        meters: of metrics that have a state of their own.
        derived: of metrics that are functions of others.
        throughput: of metrics that follow from those of several updates.
        clip_norm: where gradients are clipped: train/clipped is then 1 for an update whose norm was above it, else 0.

    Attributes:
        settled: how often metrics were settled.

    >>> storage = Storage()
    >>> storage.put("train/loss", torch.tensor(6.0), 2, update=1)
    >>> storage.put("train/loss", 3.0, 1, update=1)
    >>> storage.settle()
    [Record(update=1, name='train/loss', value=3.0, weight=3.0)]
    """

    def __init__(
        self,
        history_updates: int = 100_000,
        *,
        meters: Meters | None = None,
        derived: DerivedMetrics | None = None,
        throughput: Throughput | None = None,
        clip_norm: float | None = None,
    ) -> None:
        if history_updates < 1:
            raise ArgumentError(
                f"`history_updates` must be at least 1, but is {history_updates}; raise it.", field="history_updates"
            )
        self._limit = history_updates
        self._pending: list[Entry] = []
        self._shown: list[Shown] = []
        self._append = self._pending.append
        self._series: dict[str, Series] = {}
        self._meters = meters or Meters()
        self._derived = derived or None
        self._clip_norm = clip_norm
        self.throughput = throughput or Throughput()
        self.settled = 0
        self.observe = self._meters.observe  # what metrics with a state of their own see

    def put(self, name: str, sum: Number, weight: Number = 1.0, *, update: int) -> None:
        """Add `sum` and `weight` to metric `name` at `update`; a weight of 0 in all leaves the metric out.

        Args:
            sum: the sum over the units, a number or a detached 0-dim tensor on any device, not written to afterwards.
            weight: how many units the sum covers, likewise, at least 0; 1 for a plain value, such as a learning rate.
            update: the update that the value belongs to.
        """
        self._append((update, name, sum, weight))

    def count(self, name: str, count: Number, *, update: int) -> None:
        """Add to count `name` at `update`: a plain sum, for metrics that are derived; no metric itself.

        Args:
            name: with the place that it is counted at, such as "valid/matches".
            count: a number or a detached 0-dim tensor, as for `put`.
        """
        self._append((update, f"{COUNT}{name}", count, 0.0))

    def show(self, name: str, value: Value, *, update: int) -> None:
        """Show a text, an image or a histogram under `name` at `update`; of several under one name the first is kept.

        What it is of is read when the value is made. It reaches the writers with the next metrics: those of the first
        rank, which what other ranks show does not reach.

        Args:
            name: letters, digits, `_`, `-` and `.`, in parts divided by `/`.

        Raises:
            ArgumentError: another name, or another value.

        >>> from evenstep.events import Text
        >>> storage = Storage()
        >>> storage.show("valid/text", Text("once upon a time"), update=3)
        >>> storage.take_shown()
        [Shown(update=3, name='valid/text')]
        """
        one = Shown(update=update, name=name, value=value)
        if one not in self._shown:  # which compares update and name
            self._shown.append(one)

    def take_shown(self) -> list[Shown]:
        """What was shown since this was last called."""
        shown, self._shown = self._shown, []
        return shown

    def follow(self, settled: int) -> None:
        """Forget what is pending where others have settled it with what this rank had sent, but not heard of.

        Args:
            settled: how often any rank has.
        """
        if self.settled < settled:
            self._pending.clear()
            self._meters.reset()
        self.settled = settled

    def discard_from(self, update: int) -> None:
        """Forget what is pending for `update` and later: those updates were given up."""
        self._pending[:] = [entry for entry in self._pending if entry[0] < update]
        self._shown[:] = [one for one in self._shown if one.update < update]
        self._meters.discard_from(update)

    def mark(self) -> tuple[int, int]:
        """Where what is pending ends now, for `drop_after`; an earlier mark is then forgotten."""
        self._meters.begin_attempt()
        return len(self._pending), len(self._shown)

    def drop_after(self, mark: tuple[int, int]) -> None:
        """Forget what was put and shown since `mark`: it is about to be computed again."""
        pending, shown = mark
        del self._pending[pending:], self._shown[shown:]
        self._meters.drop_attempt()

    def pending_sum(self, name: str, *, update: int) -> Tensor:
        """Σ sums and Σ weights, shape [2], of what is pending for metric `name` at `update`; nothing is waited for.

        >>> storage = Storage()
        >>> storage.put("loss", torch.tensor(6.0), 2, update=1)
        >>> storage.pending_sum("loss", update=1)
        tensor([6., 2.], dtype=torch.float64)
        """
        pairs = [(total, weight) for number, key, total, weight in self._pending if number == update and key == name]
        device = next((one.device for pair in pairs for one in pair if isinstance(one, Tensor)), torch.device("cpu"))
        wide = torch.float32 if device.type == "mps" else torch.float64
        numbers = [scalar_on(one, device, wide) for pair in pairs for one in pair]
        return torch.stack(numbers).view(-1, 2).sum(0) if numbers else torch.zeros(2, dtype=wide, device=device)

    def settle(self, gather: Callable[[Pairs], list[Pairs]] = _alone) -> list[Record]:
        """Read everything pending and remember it; the records come by update, then in the order first put.

        Args:
            gather: gives the pairs of all ranks, by rank, each under (update, name): (sum, weight), and where these
                are of several values, what their rounding has left out, as further such pairs. A rank may lack what
                another has put, and all end with the same records.

        Raises:
            ArgumentError: for a tensor that is not one number, a weight that is negative or not finite, or a name that
                no file can hold.

        Where `gather` loses a rank, all of it stays pending. A meter's record is under the last update that any rank's
        has seen.
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
        except LostRankError:  # those that are left may go on, and settle it
            self._pending[:0] = pending
            raise
        self._meters.reset()
        self.settled += 1
        summed = joined(everybody)
        records = means(summed)
        records += self._meters.records(everybody)
        if self._derived is not None:
            counts = {(update, key[1:]): fsum(pair[::2]) for (update, key), pair in summed.items() if key[:1] == COUNT}
            records += self._derived(records, counts)
        records.sort(key=itemgetter(0))  # by update
        more = self.throughput(records)
        if more:
            records += more
            records.sort(key=itemgetter(0))
        self._remember(records)
        return records

    def names(self) -> tuple[str, ...]:
        """The metrics that have a history, in the order they first came."""
        return tuple(self._series)

    def history(self, name: str) -> list[Record]:
        """What is remembered of metric `name`, by update; empty when it never came."""
        series = self._series.get(name)
        return [] if series is None else series.records(name)[-self._limit :]

    def latest(self, name: str) -> Record | None:
        """The last value of metric `name`, or None when it never came."""
        series = self._series.get(name)
        return None if series is None else series.records(name, start=-1)[0]

    def values_before(self, update: int, name: str, count: int) -> list[float]:
        """The last `count` values of metric `name` at updates before `update`, or as many as there are."""
        series = self._series.get(name)
        return [] if series is None else series.values_before(update, count)

    def state_dict(self) -> dict[str, Any]:
        """The newest values of every metric, as plain lists. What is pending is not in it: settle and write before.

        Nor is what a clock has measured (`perf/…`): it would make two equal runs' states differ; nor what is put at the
        ends of windows (`progress/…`), but for the sum of all weights.
        """
        state: dict[str, Any] = {
            name: series.state() for name, series in self._series.items() if not name.startswith(("perf/", "progress/"))
        }
        return {**state, _TOTAL: self.throughput.total} if self.throughput.total else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved history; what is pending belongs to another course of the run and is dropped."""
        self._pending.clear()
        self._shown.clear()
        self._meters.reset()
        self.throughput.forget()
        self.throughput.total = state.get(_TOTAL, 0.0)
        self._series = {name: Series(*columns) for name, columns in state.items() if name != _TOTAL}

    def _remember(self, records: Iterable[Record]) -> None:
        of_names = defaultdict[str, list[Record]](list)
        for record in records:
            of_names[record[1]].append(record)
        for name, theirs in of_names.items():
            if name not in self._series:
                self._series[_checked(name)] = Series()
            self._series[name].add(theirs)
        for series in self._series.values():
            if len(series.updates) > 2 * self._limit:
                series.keep(self._limit)


def _checked(name: str) -> str:
    if not name.isprintable() or name in ("", "update"):
        raise ArgumentError(f"a metric's name must be printable and not `update`, but is {name!r}; rename it.")
    return name
