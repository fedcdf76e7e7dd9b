"""Global batches of several tasks, each with its own data.

The tasks of update u are a pure function of (seed, u) and of the lengths of the tasks' data.
"""

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, closing
from dataclasses import field, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, final, get_args

from evenstep.arguments import choose
from evenstep.data.batch import JSON, Data, GlobalBatch, Microbatch, Part, Position, ReadOptions
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


@option
class AllTasks(Mixing):
    """One batch of each task, or as many as its repeat factor says.

    >>> AllTasks(repeats={"box": 2})(0, {"class": 9, "box": 9}, seed=1)
    ['class', 'box', 'box']
    """

    repeats: Mapping[str, Count] = field(default_factory=dict[str, int])
    """Batches of a task in each update, or updates in each round, by task; 1 by default."""

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        return [name for name in sizes for _ in range(self.repeats.get(name, 1))]


@final
@option
class RoundRobin(AllTasks):
    """One task after the other, each for as many updates as its repeat factor says.

    >>> mixing = RoundRobin(repeats={"box": 2})
    >>> [mixing(number, {"class": 9, "box": 9}, seed=1) for number in range(4)]
    [['class'], ['box'], ['box'], ['class']]
    """

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        turns = super().__call__(number, sizes, seed=seed)
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

    temperature: Positive = 1.0
    """T of the formula."""
    weights: Mapping[str, Positive] = field(default_factory=dict[str, float])
    """n_t of the formula, of all tasks; their batches per epoch by default."""
    draws: Count = 1
    """Batches of an update, each drawn by itself."""

    def __call__(self, number: int, sizes: Mapping[str, int], *, seed: int) -> Sequence[str]:
        names = list(sizes)
        # relative to the largest, so that a small temperature overflows nothing
        logs = [math.log((self.weights or sizes)[name]) / self.temperature for name in names]
        edges = list(accumulate(math.exp(log - max(logs)) for log in logs))
        points = [key(seed, "mixture", number, draw) / 2**63 * edges[-1] for draw in range(self.draws)]
        return [names[min(bisect_right(edges, point), len(names) - 1)] for point in sorted(points)]


MIXINGS: Mapping[str, type[Mixing]] = {"all": AllTasks, "round_robin": RoundRobin, "sampled": Sampled}
"""Classes by the words of `mixing` in run files."""


class _Walk(NamedTuple):
    """Counters of a mixture before a global batch.

    Args:
        number: of the global batch in the whole run.
        places: of each task in its own data.
        ended: tasks whose data have come to an end in this epoch of the mixture.
    """

    seed: int
    position: Position
    number: int
    places: Mapping[str, Position]
    ended: AbstractSet[str] = frozenset()


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
        choose("end", end, dict.fromkeys(get_args(End)))
        self.mixing = mixing or AllTasks()
        _check_tasks(self.data, self.mixing)
        self.end: End = end
        self.limit_batches = limit_batches
        self.tasks = tuple(self.data)
        self._known: _Walk | None = None  # at the last requested or loaded position
        self._counted: dict[int, tuple[_Walk, list[int]]] = {}  # by seed: batches of each epoch before the walk
        self._size = lru_cache(2 * len(data))(self._size_of)

    def state_dict(self, at: Position | None = None) -> dict[str, Any]:
        if self._known is None:
            return {}
        walk = self._known = self._walk_to(at or self._known.position, self._known.seed)
        places = {name: list(place) for name, place in walk.places.items()}
        return {**walk._asdict(), "position": list(walk.position), "places": places, "ended": sorted(walk.ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known = None
        if state:
            places = {name: Position(*place) for name, place in state["places"].items()}
            position, ended = Position(*state["position"]), frozenset(state["ended"])
            self._known = _Walk(state["seed"], position, state["number"], places, ended)

    def num_batches(self, epoch: int, *, seed: int) -> int:
        walk, counts = self._counted.get(seed) or (self._beginning(seed), [])
        while len(counts) <= epoch:
            last = walk.position.batch
            walk = self._step(walk)[1]
            if walk.position.batch == 0:
                counts.append(last + 1)
        self._counted[seed] = walk, counts
        return counts[epoch]

    def fingerprint(self) -> dict[str, JSON]:
        prints = {name: one.fingerprint() for name, one in self.data.items()}
        cut: dict[str, JSON] = {name: one.pop("cut", None) for name, one in prints.items()}
        return {
            "kind": "mixture",
            "tasks": [[name, one] for name, one in prints.items()],
            "mixing": self.mixing.fingerprint(),
            "end": self.end,
            "limit_batches": self.limit_batches,
            "cut": cut,
        }

    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        walk = self._known = self._walk_to(read.start, read.seed)
        if walk.position != read.start:
            raise DataError(
                f"the mixture has no batch {read.start.batch} in epoch {read.start.epoch}; give it the data and mixing "
                f"of the checkpoint, or start a new run."
            )
        return self._generate(walk, read)

    def close(self) -> None:
        for one in self.data.values():
            one.close()

    def _beginning(self, seed: int) -> _Walk:
        return _Walk(seed, Position(), 0, dict.fromkeys(self.data, Position()))

    def _walk_to(self, position: Position, seed: int) -> _Walk:
        walk = self._known
        if walk is None or walk.seed != seed or walk.position > position:
            walk = self._beginning(seed)
        while walk.position < position:
            walk = self._step(walk)[1]
        return walk

    def _step(self, walk: _Walk) -> tuple[Sequence[str], _Walk]:
        """The tasks of a global batch, each with one batch of its data, and the counters after it."""
        seed = walk.seed
        places = dict(walk.places)
        ended = set(walk.ended)
        waits = ended if self.end == "max" else frozenset[str]()
        sizes = {name: self._size(name, place.epoch, seed) for name, place in places.items() if name not in waits}
        tasks: list[str] = []
        for name in self.mixing(walk.number, sizes, seed=seed):
            if name in waits:
                continue
            place = places[name]
            ends = place.batch + 1 == self._size(name, place.epoch, seed)
            places[name] = place.after(ends_epoch=ends)
            if ends:
                ended.add(name)
            tasks.append(name)
        ends_epoch = bool(ended) if self.end == "min" else len(ended) == len(self.data)
        ends_epoch = ends_epoch or walk.position.batch + 1 == self.limit_batches
        position = walk.position.after(ends_epoch=ends_epoch)
        return tasks, _Walk(seed, position, walk.number + 1, places, frozenset() if ends_epoch else ended)

    def _size_of(self, name: str, epoch: int, seed: int) -> int:
        return cast("int", self.data[name].num_batches(epoch, seed=_seed_of(name, seed)))

    def _generate(self, walk: _Walk, read: ReadOptions) -> Iterator[GlobalBatch]:
        with ExitStack() as stack:
            sources: dict[str, Iterator[GlobalBatch]] = {}
            for shift, (name, one) in enumerate(self.data.items()):
                rank = (read.rank + shift) % read.ranks
                of_task = replace(read, start=walk.places[name], seed=_seed_of(name, read.seed), rank=rank)
                sources[name] = one.batches(of_task)
                stack.enter_context(closing(cast("Any", sources[name])))
            while True:
                tasks, following = self._step(walk)
                batches = [(name, next(sources[name])) for name in tasks]
                yield _joined(walk.position, following.position, batches)
                walk = following


def _seed_of(task: str, seed: int) -> int:
    return key(seed, "task", task)  # tasks on one dataset visit it in different orders


def _joined(position: Position, following: Position, batches: Sequence[tuple[str, GlobalBatch]]) -> GlobalBatch:
    parts: list[Part] = []
    microbatches: list[Microbatch] = []
    count = 0
    for name, batch in batches:
        parts.append(Part(task=name, num_microbatches=batch.num_microbatches, num_samples=batch.num_samples))
        microbatches += [replace(one, index=count + one.index, task=name) for one in batch.microbatches]
        count += batch.num_microbatches
    return GlobalBatch(
        position=position,
        following=following,
        microbatches=tuple(microbatches),
        num_microbatches=count,
        num_samples=sum(part.num_samples for part in parts),
        faults=tuple([fault for _, batch in batches for fault in batch.faults]),
        parts=tuple(parts),
    )


def _check_tasks(data: Mapping[str, Data], mixing: Mixing) -> None:
    for name, one in data.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ArgumentError(
                f"a task's name must be of letters, digits, `_` and `-`, but one is {name!r}; rename it.", field="data"
            )
        if one.tasks != ("",) or one.positions != "all":
            raise ArgumentError(
                f"the data of task `{name}` must be of one task and know their length, but are {type(one).__name__}; "
                f"give `MapData`, or mix in the stream itself and give it to `UpdateData`.",
                field="data",
            )
    for option_name, given in vars(mixing).items():
        unknown = [name for name in given if name not in data] if isinstance(given, Mapping) else []
        if unknown:
            raise ArgumentError(
                f"`{option_name}` is given for {', '.join(unknown)}, but the mixture has {', '.join(data)}; rename it.",
                field=option_name,
            )
