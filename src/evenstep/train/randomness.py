"""Keyed randomness: the generators of micro-batch k of update u are seeded from (seed, u, k), those of its step from
(seed, u), and those of a hook from (seed, u, its name).

So dropout does not depend on which rank runs k, on what ran before, or on how often the run was resumed, and no
generator state is ever saved. Where the layers of a model are known, whole or in stages, each layer and the loss have a
key of their own below that (see `layer_keys`), so that it does not matter who runs them either. Python's and numpy's
generators cost more to seed than a small update may; they are seeded as well wherever something draws from them.
"""

import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, final
from zlib import crc32

import numpy as np
import torch

from evenstep.data.seeding import numpy_words
from evenstep.keys import branch_below, key_below

LOSS = crc32(b"loss") | 1 << 40  # as `keys` takes the name "loss", without encoding it each time
_seed_cpu = torch.default_generator.manual_seed
_get_cpu, _set_cpu = torch.default_generator.get_state, torch.default_generator.set_state
_seed_of_cpu = torch.default_generator.initial_seed
# Of a Mersenne twister that was seeded and has drawn nothing: the first of its words (of Python's), its place behind
# them, and no normal number that is left over. After its first draw the place is another, and with it all words.
_SEEDED = 1 << 31, 624, None
LOOKS = 256  # passages between two looks, once it has looked at the 1st, 2nd, 4th, … of them


def seed_torch(device: torch.device, number: int) -> None:
    """Seed torch's CPU generator and that of `device` with `number`, a key.

    >>> from evenstep.keys import key
    >>> cpu = torch.device("cpu")
    >>> seed_torch(cpu, key(42, 1, 0)); first = torch.rand(1)
    >>> seed_torch(cpu, key(42, 1, 1)); second = torch.rand(1)
    >>> seed_torch(cpu, key(42, 1, 0)); bool(first == torch.rand(1)), bool(first == second)
    (True, False)
    """
    # torch.manual_seed would also walk over every other backend: 0.3 ms on an idle machine, in each micro-batch.
    _seed_cpu(number)
    if device.type != "cpu":
        seed_device(device, number)


def seed_device(device: torch.device, number: int) -> None:
    """Seed the generator of an accelerator."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
    else:
        torch.get_device_module(device).manual_seed(number)


def _seed_python_and_numpy(number: int) -> None:
    random.seed(number)
    np.random.seed(number >> 31)  # from other bits: all three are Mersenne twisters


class RandomnessSnapshot(NamedTuple):
    """Random state of a part of a forward, beside torch's generators, for its recomputation.

    Args:
        python: the state of Python's generator as it begins.
        numpy: that of numpy's.
        state: the branch of the keys of its micro-batch.
        paths: of the keys of the layers that begin within it, in their order.
        seeds_all: whether Python's and numpy's are seeded with each of them.
    """

    python: Any
    numpy: Any
    state: int
    paths: list[tuple[int, ...]]
    seeds_all: bool


@final
class Randomness:
    """The generators of one run, micro-batch by micro-batch.

    Whether anything draws from Python's or numpy's is found out by looking: in some of the passages both are seeded
    and compared afterwards. Once something has drawn, they are seeded with every key.

    >>> randomness = Randomness(); randomness.begin_passage()
    >>> randomness.begin(torch.device("cpu"), 5); first = random.random()
    >>> randomness.begin(torch.device("cpu"), 5); first == random.random()
    True
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._state = 0
        self._passages: dict[tuple[object, ...], int] = {}
        self._next_look: dict[tuple[object, ...], int] = {}
        self._seeds_all = False
        self._fresh: bytes | None = None  # numpy's state after both were seeded, while it looks
        self._callers: tuple[Any, Any] | None = None  # the caller's states, while they are to be given back
        self._keeps = False
        self._has_drawn = False
        self.by_layer = False  # whether a whole model's layers are known, so that the loss has a key of its own
        self.under_way = False
        self.begun = 0
        self._moment: RandomnessSnapshot | None = None  # of the part of a forward that runs now, to be computed again
        # that which is being computed again
        self._again: tuple[RandomnessSnapshot, Iterator[tuple[int, ...]]] | None = None

    @contextmanager
    def undisturbed(self, device: torch.device) -> Generator[None]:
        """As the function of `data.seeding`, for single updates: numpy's and Python's are kept only if seeded."""
        self._keeps, self._callers = True, None
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            callers, self._keeps, self._callers = self._callers, False, None
            if callers is not None:
                random.setstate(callers[0])
                np.random.set_state(callers[1])

    def begin_passage(self, *kind: object) -> None:
        number = self._passages[kind] = self._passages.get(kind, 0) + 1
        looks = not self._has_drawn and number >= self._next_look.get(kind, 1)
        if looks:
            self._next_look[kind] = number * 2 if number < LOOKS else number + LOOKS
        self._seeds_all = looks or self._has_drawn

    def end_passage(self) -> None:
        """They have ended."""
        self.under_way = False
        self._look()

    @contextmanager
    def step(self, device: torch.device, number: int) -> Generator[None]:
        """Inside, the optimizer's step draws from the key `number`, the same on all ranks."""
        self._device = device
        self.begin_passage("step")
        self._seed(number)
        try:
            yield
        finally:
            self.end_passage()

    @contextmanager
    def apart(self, device: torch.device, number: int, kind: str) -> Generator[None]:
        """Seed the generators with the key `number`; their states are restored afterwards.

        Args:
            kind: of what it is; it may draw where others do not.

        >>> randomness = Randomness()
        >>> with randomness.apart(torch.device("cpu"), 5, "hook"): first = torch.rand(1), random.random()
        >>> with randomness.apart(torch.device("cpu"), 5, "hook"): print(first == (torch.rand(1), random.random()))
        True
        """
        self._look()
        outer = self._seeds_all, self.under_way
        self.begin_passage(kind)
        self._device, self.under_way = device, False
        cpu, others = _get_cpu(), (random.getstate(), np.random.get_state()) if self._seeds_all else None
        try:
            # on a CPU alone it would cost several times as much as what is done here
            with torch.random.fork_rng([device]) if device.type == "cuda" else nullcontext():
                self._seed(number)
                yield
                self._look()
        finally:
            self._fresh = None
            _set_cpu(cpu)
            if others is not None:
                random.setstate(others[0])
                np.random.set_state(others[1])
            self._seeds_all, self.under_way = outer

    def begin(self, device: torch.device, state: int) -> None:
        """A micro-batch begins, with what comes before the model.

        Args:
            state: the branch of its keys.
        """
        self._device, self._state = device, state
        self.under_way = True
        self.begun += 1
        self._seed(key_below(state))

    def place(self, place: int) -> None:
        """A layer of it begins, by its place in the model, or its `LOSS`."""
        self._seed(key_below(self._state, place))

    def begin_layer(self, places: list[int], calls: dict[int, int]) -> None:
        """A layer of a whole model begins.

        Each call in a micro-batch draws other numbers, as where a task calls the model twice. A forward that torch's
        checkpointing computes again is the same call: its generators are then those with which that began.

        Args:
            places: of the layer in the model, for one call after the other.
            calls: the numbers of its calls in this micro-batch, by what torch's generator was seeded with before.
        """
        if self._again is not None:
            moment, again = self._again
            number = key_below(moment.state, *next(again))
            seed_torch(self._device, number)
            if moment.seeds_all:
                _seed_python_and_numpy(number)
            return
        through, call = divmod(calls.setdefault(_seed_of_cpu(), len(calls)), len(places))
        path = (places[call], through) if through else (places[call],)
        self._seed(key_below(self._state, *path))
        if self._moment is not None:
            self._moment.paths.append(path)

    @contextmanager
    def noted(self) -> Generator[RandomnessSnapshot]:
        moment = RandomnessSnapshot(random.getstate(), np.random.get_state(), self._state, [], self._seeds_all)
        outer, self._moment = self._moment, moment
        try:
            yield moment
        finally:
            self._moment = outer

    @contextmanager
    def again(self, moment: RandomnessSnapshot) -> Generator[None]:
        """Random state of a recorded part while it is recomputed; torch's generators are set by the caller.

        >>> randomness = Randomness()
        >>> with randomness.noted() as moment: first = random.random()
        >>> with randomness.again(moment): print(random.random() == first)
        True
        """
        before, outer = (random.getstate(), np.random.get_state()), self._again
        random.setstate(moment.python)
        np.random.set_state(moment.numpy)
        self._again = moment, iter(moment.paths)
        try:
            yield
        finally:
            self._again = outer
            random.setstate(before[0])
            np.random.set_state(before[1])

    def _seed(self, number: int) -> None:
        _seed_cpu(number)
        if self._device.type != "cpu":
            seed_device(self._device, number)
        if self._seeds_all:
            self._seed_others(number)

    def _seed_others(self, number: int) -> None:
        self._look()
        if self._keeps and self._callers is None:
            self._callers = random.getstate(), np.random.get_state()
        _seed_python_and_numpy(number)
        if not self._has_drawn:
            self._fresh = numpy_words()

    def _look(self) -> None:
        if self._fresh is None:
            return
        fresh, self._fresh = self._fresh, None
        words, gauss = random.getstate()[1:]
        if (words[0], words[-1], gauss) != _SEEDED or numpy_words() != fresh:
            self._has_drawn = True


def branch_of(state: int, index: int, path: tuple[int, ...]) -> int:
    return branch_below(state, index, "part", *path) if path else branch_below(state, index)
