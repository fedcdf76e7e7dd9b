"""Global batches of several tasks, each with its own data: a `Data` made of `Data`s.

Which tasks update u takes batches of is a pure function of (seed, u) and of how many batches each task's data has, so
all ranks agree, any position is a place to start, and nothing is saved. The micro-batches of all tasks are numbered
together, 0..n-1: for ranks, plans and ordered sums a mixture is one global batch like any other. How the tasks' losses
are weighed against each other is not decided here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, cast, final, get_args

from evenstep.arguments import require_count, require_object, require_rank, require_table, require_word
from evenstep.data.batch import JSON, Data, GlobalBatch, Microbatch, Part, Position
from evenstep.data.mixing import AllTasks, Mixing
from evenstep.data.mixing.mixing import check_known
from evenstep.data.resolve import data_of
from evenstep.errors import ArgumentError, DataError
from evenstep.keys import key

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

End = Literal["min", "max", "cycle"]
Windows = Mapping[str, tuple[int, int | None]]
_LOOKS_EVERY = 10**5  # updates of an epoch that are counted before it is asked, each time, whether it will ever end


@final
class _Walk:
    """Through the global batches of a mixture from the first one on: the same on every rank, and on every resume.

    Attributes:
        places: the batch that each task's data gives next.
        number: of the next global batch in the whole run.
        position: the same, by epochs of the mixture.
    """

    def __init__(self, data: Mapping[str, Data], mixing: Mixing, end: End, windows: Windows, seed: int) -> None:
        self._data, self._mixing, self._end, self._windows, self.seed = data, mixing, end, windows, seed
        self.places = dict.fromkeys(data, Position())
        self.number, self.position = 0, Position()
        self._ended: set[str] = set()  # the tasks whose data have come to an end in this epoch of the mixture
        self._sizes: dict[str, tuple[int, int]] = {}  # which epoch a task's data is in, and its batches

    def step(self) -> Sequence[str]:
        """Move behind the next global batch; gives the tasks whose batches it takes."""
        ready = [name for name in self._active(self.number) if self._end != "max" or name not in self._ended]
        if not ready:
            raise DataError(
                f"no task takes part in update {self.number + 1} of the mixture; widen `windows`, or train for fewer "
                f"updates."
            )
        sizes = {name: self._size(name) for name in ready}
        tasks = [name for name in self._mixing(self.number, sizes, seed=self.seed) if self._take(name)]
        self.number += 1
        later = set(self._active(self.number))
        ends_epoch = bool(self._ended) if self._end == "min" else bool(self._ended) and self._ended >= later
        self.position = self.position.after(ends_epoch=ends_epoch)
        if ends_epoch:
            self._ended = set()
        return tasks

    def seldom(self) -> str:
        """A task for which this epoch lasts a thousand times as long as all would one after the other; "" if none."""
        waiting = [name for name in self._active(self.number) if name not in self._ended]
        whole = sum(self._size(name) for name in self._data)
        return waiting[0] if waiting and self.position.batch > 1000 * whole else ""

    def _active(self, number: int) -> list[str]:
        return [name for name in self._data if _within(self._windows.get(name, (1, None)), number + 1)]

    def _size(self, name: str) -> int:
        epoch = self.places[name].epoch
        known, size = self._sizes.get(name, (-1, 0))
        if known != epoch:
            size = cast("int", self._data[name].num_batches(epoch, seed=task_seed(self.seed, name)))
            self._sizes[name] = epoch, size
        return size

    def _take(self, name: str) -> bool:
        """Move behind the next batch of a task; False where it is to wait for the others."""
        if self._end == "max" and name in self._ended:
            return False
        place = self.places[name]
        ends = place.batch + 1 == self._size(name)
        self.places[name] = place.after(ends_epoch=ends)
        if ends:
            self._ended.add(name)
        return True


def _within(window: tuple[int, int | None], update: int) -> bool:
    return window[0] <= update and (window[1] is None or update <= window[1])


def task_seed(seed: int, task: str) -> int:
    """The seed of a task's data, so that tasks on one dataset visit it in different orders."""
    return key(seed, "task", task)


@final
class Mixture(Data):
    """Several tasks' global batches, taken together.

    Each task's data goes on where it was, epoch after epoch of its own. Where one comes to its end, `end` says when the
    mixture's epoch ends: "min" at once, with whoever ends first; "cycle" when every task has been through its data
    once, and those that were through earlier have begun again; "max" likewise, but those that were through earlier
    wait, so every sample is in exactly one batch of each epoch of the mixture.

    On several ranks each task's micro-batches are divided as its data divides them, beginning with another rank for
    each task, so that tasks of a single micro-batch do not all fall to one rank.

    Args:
        data: of each task, by its name; data that know how many batches they have, or a `DataLoader`.
        mixing: chooses the tasks of each update; all by default.
        end: what happens when a task comes to the end of its data.
        windows: (first, last) update of tasks that do not take part in all, counted from 1; a last one of None is open.

    Raises:
        ArgumentError: a name, a window or a task's data that cannot be.

    >>> from evenstep.data.map_data import MapData
    >>> sets = {"class": [1, 2, 3], "box": [10, 20]}
    >>> data = {name: MapData(some, global_batch_size=1, shuffle=False) for name, some in sets.items()}
    >>> batches = Mixture(data, end="max").batches(Position(), seed=1)
    >>> [[(one.index, one.task, one.data.item()) for one in next(batches).microbatches] for _ in range(3)]
    [[(0, 'class', 1), (1, 'box', 10)], [(0, 'class', 2), (1, 'box', 20)], [(0, 'class', 3)]]
    """

    def __init__(
        self,
        data: "Mapping[str, Data | DataLoader[Any]]",
        *,
        mixing: Mixing | None = None,
        end: End = "cycle",
        windows: Windows | None = None,
    ) -> None:
        if not isinstance(cast("object", data), Mapping):
            raise ArgumentError(
                f"a mixture must be given the data of each task by its name, `Mixture({{'class': data}})`, but is "
                f"given a {type(data).__name__}."
            )
        if not data:
            raise ArgumentError("a mixture needs the data of one task at least, but `data` is empty.")
        self._data = {name: data_of(one, f"data[{name!r}]") for name, one in data.items()}
        for name, one in self._data.items():
            _check_task(name, one)
        require_object("mixing", mixing, Mixing, "`mixing=AllTasks()`", may_be_none=True)
        require_table("windows", windows, "`windows={'box': (1, None)}`", may_be_none=True)
        require_word("end", end, get_args(End))
        self._mixing = mixing or AllTasks()
        self._end: End = end
        check_windows(windows or {}, list(data))
        self._windows: Windows = deepcopy(dict(windows or {}))
        self._mixing.check(list(data))
        self._epochs: dict[int, tuple[_Walk, list[int]]] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self._data)

    @property
    def data(self) -> Mapping[str, Data]:
        """The data of each task."""
        return self._data

    def preview(self, count: int, *, seed: int) -> list[Sequence[str]]:
        """The tasks of the first `count` global batches.

        >>> from evenstep.data.map_data import MapData
        >>> data = {name: MapData([1, 2], global_batch_size=1) for name in ("class", "box")}
        >>> Mixture(data, windows={"box": (2, None)}).preview(2, seed=1)
        [['class'], ['class', 'box']]
        """
        walk = self._walk(seed)
        return [walk.step() for _ in range(count)]

    def check(self, updates: int | None) -> None:
        """Raise ArgumentError if no task takes part in the last of so many updates, if known."""
        check_windows(self._windows, self.tasks, updates)

    def not_taken_once(self, *, seed: int) -> str:
        """The first task whose samples are not in exactly one batch each of the first epoch; "" if there is none.

        >>> from evenstep.data.map_data import MapData
        >>> data = {"class": MapData([1, 2], global_batch_size=1), "box": MapData([1], global_batch_size=1)}
        >>> Mixture(data).not_taken_once(seed=1), Mixture(data, end="max").not_taken_once(seed=1)
        ('box', '')
        """
        walk, once = self._walk(seed), Position(1, 0)
        while (self._end != "max" or self._windows) and not walk.position.epoch:
            walk.step()
            if again := next((name for name, place in walk.places.items() if place > once), ""):
                return again  # not only then: an epoch of tasks that are drawn seldom is long
        return next((name for name, place in walk.places.items() if walk.number and place != once), "")

    @property
    def knows_length(self) -> bool:
        return True

    def num_batches(self, epoch: int, *, seed: int) -> int:
        require_count("epoch", epoch, at_least=0)
        walk, counts = self._epochs.setdefault(seed, (self._walk(seed), []))
        while len(counts) <= epoch:
            last = walk.position.batch
            if last and last % _LOOKS_EVERY == 0 and (missing := walk.seldom()):
                raise ArgumentError(
                    f"the epochs of the mixture can't be counted: after {last} updates epoch {len(counts)} goes on, "
                    f"since task `{missing}` is taken so seldom that it has not been through its data; let it be taken "
                    f'more often (`mixing`), let epochs end with the first task (`end="min"`), or train for a number '
                    f"of `updates`."
                )
            walk.step()
            if walk.position.batch == 0:
                counts.append(last + 1)
        return counts[epoch]

    def fingerprint(self) -> dict[str, JSON]:
        """Each task's, in order, and everything that decides which of them make an update."""
        return {
            "kind": "mixture",
            "tasks": [[name, one.fingerprint()] for name, one in self._data.items()],
            "mixing": self._mixing.fingerprint(),
            "end": self._end,
            "windows": {name: list[JSON](window) for name, window in self._windows.items()},
        }

    def cut(self) -> dict[str, JSON]:
        return {name: one.cut() for name, one in self._data.items()}

    def to_cut_finer(self, samples: int) -> str:
        return "lower the `micro_batch_size` of its parts"

    def batches(
        self, start: Position, *, seed: int, rank: int = 0, ranks: int = 1, pin_memory: bool = False
    ) -> Iterator[GlobalBatch]:
        require_rank(rank, ranks)
        walk = self._walk(seed)
        while walk.position != start:
            if walk.position > start:
                raise DataError(
                    f"the mixture has no batch {start.batch} in epoch {start.epoch}; its data or the way of mixing are "
                    f"others than when the run was saved: set them back, or start a new run."
                )
            walk.step()
        return self._generate(walk, rank=rank, ranks=ranks, pin_memory=pin_memory)

    def close(self) -> None:
        for one in self._data.values():
            one.close()

    def _walk(self, seed: int) -> _Walk:
        return _Walk(self._data, self._mixing, self._end, self._windows, seed)

    def _generate(self, walk: _Walk, *, rank: int, ranks: int, pin_memory: bool) -> Iterator[GlobalBatch]:
        with ExitStack() as stack:
            sources: dict[str, Iterator[GlobalBatch]] = {}
            for place, (name, one) in enumerate(self._data.items()):
                sources[name] = one.batches(
                    walk.places[name],
                    seed=task_seed(walk.seed, name),
                    rank=(rank + place) % ranks,
                    ranks=ranks,
                    pin_memory=pin_memory,
                )
                stack.enter_context(closing(cast("Any", sources[name])))
            while True:
                yield _next_of(walk, sources)


def _next_of(walk: _Walk, sources: Mapping[str, Iterator[GlobalBatch]]) -> GlobalBatch:
    """The next global batch of the walk, of the batches that its tasks give next."""
    position, tasks = walk.position, walk.step()
    parts: list[Part] = []
    microbatches: list[Microbatch] = []
    count = 0
    for name in tasks:
        began = perf_counter()
        batch = next(sources[name], None)
        if batch is None:
            raise DataError(
                f"the data of task `{name}` ended, but a mixture goes on; give it data without `num_epochs`."
            )
        waited = perf_counter() - began
        parts.append(
            Part(task=name, num_microbatches=batch.num_microbatches, num_samples=batch.num_samples, data_s=waited)
        )
        microbatches += [replace(one, index=count + one.index, task=name) for one in batch.microbatches]
        count += batch.num_microbatches
    return GlobalBatch(
        position=position,
        following=walk.position,
        microbatches=tuple(microbatches),
        num_microbatches=count,
        num_samples=sum(part.num_samples for part in parts),
        ends_epoch=walk.position.batch == 0,
        parts=tuple(parts),
    )


def _check_task(name: str, data: Data) -> None:
    if not isinstance(cast("object", name), str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ArgumentError(f"a task's name must be of letters, digits, `_` and `-`, but one is {name!r}; rename it.")
    if data.tasks != ("",):
        raise ArgumentError(f"the data of task `{name}` are of several tasks themselves; put them side by side.")
    if not data.knows_length:
        raise ArgumentError(
            f"a mixture must know how many batches each task has, but the data of task `{name}` are a stream, which "
            f"does not say; mix in the stream itself and give it to `UpdateData`, or give the task a dataset with a "
            f"length."
        )


def check_windows(windows: Windows, tasks: Sequence[str], updates: int | None = None) -> None:
    """Raise ArgumentError for updates between which a task, or any of `tasks`, can't take part.

    Args:
        windows: of the tasks that do not take part in all updates.
        tasks: all.
        updates: of the run; None if that is not known.
    """
    check_known("windows", windows, tasks)
    for name, window in windows.items():
        several = isinstance(cast("object", window), tuple | list) and len(window) == 2
        first, last = window if several else (window, None)
        if not several or type(first) is not int or first < 1 or not (last is None or type(last) is int):
            raise ArgumentError(
                f"`windows` of task `{name}` must be (first update, last update), from 1, with None for no last one, "
                f"but is {window!r}."
            )
        if last is not None and last < first:
            raise ArgumentError(
                f"`windows` of task `{name}` must end at its first update, {first}, or later, but ends at {last}."
            )
    end, last_of = 0, ""  # until where no update is without a task, and the task that ends there
    for name, (first, last) in sorted(
        ((name, windows.get(name, (1, None))) for name in tasks), key=lambda one: one[1][0]
    ):
        if first > end + 1 and not end:
            raise ArgumentError(
                f"no task takes part in the first update: task `{name}` is the first to begin, at update {first}; let "
                f"one begin at update 1."
            )
        if first > end + 1:
            raise ArgumentError(
                f"`windows` of task `{last_of}` must end at update {first - 1} or later, since no other task begins "
                f"before update {first}, but ends at {end}; else no task takes part in between."
            )
        if last is None:
            return
        if last > end:
            end, last_of = last, name
    if last_of and updates is not None and updates > end:
        raise ArgumentError(
            f"`windows` of task `{last_of}` must end with update {updates}, the last of the run, or later, as no other "
            f"task takes part after it, but ends at {end}; give it no end, or train for fewer updates."
        )
