"""Global batches of several tasks, each with its own data.

The tasks of update u are a pure function of (seed, u) and of the lengths of the tasks' data.
"""

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, cast, final, get_args

from evenstep.arguments import require_word
from evenstep.data.batch import JSON, Data, DataFault, GlobalBatch, Microbatch, Part, Position, ReadOptions
from evenstep.data.from_loader import data_of
from evenstep.errors import ArgumentError, DataError
from evenstep.keys import key
from evenstep.schema import Count, Positive, option

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

End = Literal["min", "max", "cycle"]


class Mixing(ABC):
    """Chooses the tasks of each update, a pure function of its arguments."""

    @abstractmethod
    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        """The tasks that global batch `number` of the run takes one batch of each; a task named twice gives two.

        `sizes` are the batches per epoch of each task that has some left, in the mixture's order.
        """

    def fingerprint(self) -> dict[str, JSON]:
        """Everything that must be equal for a resumed run to be exact."""
        return {"kind": type(self).__name__, **vars(self)}

    def check(self, tasks: Sequence[str]) -> None:
        """Raise ArgumentError unless the options for single tasks are about `tasks`."""


@option
class _Repeated(Mixing):
    _: KW_ONLY
    repeats: Mapping[str, Count] = field(default_factory=dict[str, int])
    """Batches of a task in each update, or updates in each round, by task; 1 by default."""

    def check(self, tasks: Sequence[str]) -> None:
        _check_tasks("repeats", {**dict.fromkeys(tasks), **self.repeats}, tasks)

    def _turns(self, tasks: Mapping[str, int]) -> list[str]:
        return [name for name in tasks for _ in range(self.repeats.get(name, 1))]


@final
@option
class AllTasks(_Repeated):
    """One batch of each task, or as many as its repeat factor says.

    >>> AllTasks(repeats={"box": 2})(0, {"class": 9, "box": 9}, seed=1)
    ['class', 'box', 'box']
    """

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        return self._turns(sizes)


@final
@option
class RoundRobin(_Repeated):
    """One task after the other, each for as many updates as its repeat factor says.

    >>> mixing = RoundRobin(repeats={"box": 2})
    >>> [mixing(number, {"class": 9, "box": 9}, seed=1) for number in range(4)]
    [['class'], ['box'], ['box'], ['class']]
    """

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        turns = self._turns(sizes)
        return [turns[number % len(turns)]]


@final
@option
class Sampled(Mixing):
    """Tasks drawn at random, in proportion to their data or flatter.

    With n_t the batches per epoch of task t (or the weights given) and temperature T,

        p_t = n_t^(1/T) / Σ_s n_s^(1/T)

    so T = 1 is proportional, and T → ∞ draws all tasks alike.

    Reference: Arivazhagan et al., "Massively multilingual neural machine translation in the wild", 2019 (temperature).
    """

    _: KW_ONLY
    temperature: Positive = 1.0
    """T of the formula."""
    weights: Mapping[str, Positive] = field(default_factory=dict[str, float])
    """n_t of the formula; the tasks' batches per epoch by default."""
    draws: Count = 1
    """Batches of an update, each drawn by itself."""

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        names = list(sizes)
        # relative to the largest, so that a small temperature overflows nothing
        logs = [math.log(self.weights.get(name, sizes[name])) / self.temperature for name in names]
        edges = list(accumulate(math.exp(log - max(logs)) for log in logs))
        points = [key(seed, "mixture", number, draw) / 2**63 * edges[-1] for draw in range(self.draws)]
        return [names[min(bisect_right(edges, point), len(names) - 1)] for point in sorted(points)]

    def check(self, tasks: Sequence[str]) -> None:
        _check_tasks("weights", self.weights or dict.fromkeys(tasks), tasks)


MIXINGS: Mapping[str, type[Mixing]] = {"all": AllTasks, "round_robin": RoundRobin, "sampled": Sampled}
"""Classes by the words of `mixing` in run files."""


def _check_tasks(argument: str, given: Mapping[str, object], tasks: Sequence[str]) -> None:
    if set(given) != set(tasks):
        raise ArgumentError(
            f"`{argument}` is given for {', '.join(given)}, but the mixture has {', '.join(tasks)}; rename or add one.",
            field=argument,
        )


@final
class _Walk:
    """Counters of a mixture: the place of each task, update after update."""

    def __init__(self, mixture: "Mixture", seed: int, state: Mapping[str, Any] | None = None) -> None:
        self.seed = seed
        # tasks on one dataset visit it in different orders
        self.seeds = {name: key(seed, "task", name) for name in mixture.data}
        self.position = Position()
        self.places = dict.fromkeys(mixture.data, Position())
        self._mixture = mixture
        self._number = 0  # of the global batch in the whole run
        self._ended: set[str] = set()  # tasks whose data have come to an end in this epoch of the mixture
        if state is not None:
            self.position = Position(*state["position"])
            self.places = {name: Position(*state["places"][name]) for name in mixture.data}
            self._number = state["number"]
            self._ended = set(state["ended"])
        self._sizes = {name: self._size(name) for name in mixture.data}  # batches in the epoch of each task

    def step(self) -> Sequence[str]:
        """Go to the next position; gives the tasks between, each with one batch."""
        end = self._mixture.end
        sizes = {name: size for name, size in self._sizes.items() if end != "max" or name not in self._ended}
        tasks = [name for name in self._mixture.mixing(self._number, sizes, seed=self.seed) if self._take(name)]
        self._number += 1
        ends_epoch = bool(self._ended) if end == "min" else len(self._ended) == len(self._sizes)
        ends_epoch = ends_epoch or self.position.batch + 1 == self._mixture.limit_batches
        self.position = self.position.after(ends_epoch=ends_epoch)
        if ends_epoch:
            self._ended = set()
        return tasks

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "position": list(self.position),
            "number": self._number,
            "places": {name: list(place) for name, place in self.places.items()},
            "ended": sorted(self._ended),
        }

    def _take(self, name: str) -> bool:
        if self._mixture.end == "max" and name in self._ended:
            return False
        ends_epoch = self.places[name].batch + 1 == self._sizes[name]
        self.places[name] = self.places[name].after(ends_epoch=ends_epoch)
        if ends_epoch:
            self._ended.add(name)
            self._sizes[name] = self._size(name)
        return True

    def _size(self, name: str) -> int:
        return cast("int", self._mixture.data[name].num_batches(self.places[name].epoch, seed=self.seeds[name]))


@final
class Mixture(Data):
    """Several tasks' global batches, taken together.

    Each task's data goes on where it was, epoch after epoch of its own. On several ranks each task begins with another
    rank, so that tasks of a single micro-batch do not all fall to one rank.

    Args:
        data: of each task, by its name; data that know how many batches they have, or a `DataLoader`.
        mixing: chooses the tasks of each update; all by default.
        end: the mixture's epoch ends where a task comes to its end ("min"), or when every task has been through its
            data: shorter ones begin again ("cycle") or wait ("max").
        limit_batches: most global batches of an epoch; the next epoch goes on with the batches that follow.
    """

    def __init__(
        self,
        data: "Mapping[str, Data | DataLoader[Any]]",
        *,
        mixing: Mixing | None = None,
        end: End = "cycle",
        limit_batches: int | None = None,
    ) -> None:
        if not data:
            raise ArgumentError("a mixture needs the data of one task at least, but `data` is empty.", field="data")
        self.data: Mapping[str, Data] = {name: data_of(one, f"data[{name!r}]") for name, one in data.items()}
        for name, one in self.data.items():
            _check_task(name, one)
        require_word("end", end, get_args(End))
        self.mixing = mixing or AllTasks()
        self.mixing.check(list(data))
        self.end: End = end
        self.limit_batches = limit_batches
        self.tasks = tuple(self.data)
        self._walk: _Walk | None = None  # of the last reader
        self._known: dict[str, Any] = {}  # state at the last requested or loaded position
        self._epochs: dict[int, tuple[_Walk, list[int]]] = {}  # by seed: batches of each epoch

    def state_dict(self, at: Position | None = None) -> dict[str, Any]:
        if self._walk is not None:
            self._known = self._walk_to(at or self._walk.position, self._walk.seed).state_dict()
        return dict(self._known)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and set(state.get("places", ())) != set(self.data):
            raise DataError(
                f"a state of a mixture must hold the tasks {', '.join(self.data)}, but holds {sorted(state)}; resume "
                f"with the data of the checkpoint."
            )
        self._known = dict(state)

    def num_batches(self, epoch: int, *, seed: int) -> int:
        walk, counts = self._epochs.setdefault(seed, (_Walk(self, seed), []))
        while len(counts) <= epoch:
            last = walk.position.batch
            walk.step()
            if walk.position.batch == 0:
                counts.append(last + 1)
        return counts[epoch]

    def fingerprint(self) -> dict[str, JSON]:
        prints = {name: one.fingerprint() for name, one in self.data.items()}
        cut: dict[str, JSON] = {name: one.pop("cut", None) for name, one in prints.items()}
        return {
            "kind": "mixture",
            "tasks": [[name, one] for name, one in prints.items()],
            "mixing": self.mixing.fingerprint(),
            "end": self.end,
            **({} if self.limit_batches is None else {"limit_batches": self.limit_batches}),
            "cut": cut,
        }

    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        walk = self._walk = self._walk_to(read.start, read.seed)
        if walk.position != read.start:
            raise DataError(
                f"the mixture has no batch {read.start.batch} in epoch {read.start.epoch}; give it the data and mixing "
                f"of the checkpoint, or start a new run."
            )
        return self._generate(walk, read)

    def close(self) -> None:
        for one in self.data.values():
            one.close()

    def _walk_to(self, position: Position, seed: int) -> _Walk:
        known = self._known
        is_before = bool(known) and known["seed"] == seed and Position(*known["position"]) <= position
        walk = _Walk(self, seed, known if is_before else None)
        while walk.position < position:
            walk.step()
        return walk

    def _generate(self, walk: _Walk, read: ReadOptions) -> Iterator[GlobalBatch]:
        with ExitStack() as stack:
            sources: dict[str, Iterator[GlobalBatch]] = {}
            for place, (name, one) in enumerate(self.data.items()):
                rank = (read.rank + place) % read.ranks
                of_task = replace(read, start=walk.places[name], seed=walk.seeds[name], rank=rank, total=None)
                sources[name] = one.batches(of_task)
                stack.enter_context(closing(cast("Any", sources[name])))
            while True:
                yield _next_of(walk, sources)


def _next_of(walk: _Walk, sources: Mapping[str, Iterator[GlobalBatch]]) -> GlobalBatch:
    position = walk.position
    parts: list[Part] = []
    microbatches: list[Microbatch] = []
    faults: list[DataFault] = []
    count = 0
    for name in walk.step():
        batch = next(sources[name])
        sizes = {"num_microbatches": batch.num_microbatches, "num_samples": batch.num_samples}
        parts.append(Part(task=name, **sizes))
        microbatches += [replace(one, index=count + one.index, task=name) for one in batch.microbatches]
        faults += batch.faults
        count += batch.num_microbatches
    return GlobalBatch(
        position=position,
        following=walk.position,
        microbatches=tuple(microbatches),
        num_microbatches=count,
        num_samples=sum(part.num_samples for part in parts),
        ends_epoch=walk.position.batch == 0,
        faults=tuple(faults),
        parts=tuple(parts),
    )


def _check_task(name: str, data: Data) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ArgumentError(
            f"a task's name must be of letters, digits, `_` and `-`, but one is {name!r}; rename it.", field="data"
        )
    if data.tasks != ("",) or data.positions != "all":
        raise ArgumentError(
            f"the data of task `{name}` must be of one task and know their length, but are {type(data).__name__}; give "
            f"`MapData`, or mix in the stream itself and give it to `UpdateData`.",
            field="data",
        )
