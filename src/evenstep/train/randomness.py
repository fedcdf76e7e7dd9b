"""Keyed randomness: generators of micro-batch k of update u are seeded from (seed, u, k), those of its optimizer step
from (seed, u), those of a hook from (seed, u, its name).

Dropout then depends neither on the rank that runs k, nor on earlier work, nor on resumes; no generator state is saved.
Where the layers of a model are known (see `layer_keys`), each layer and the loss have a key of their own below that.
"""

import random
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final
from zlib import crc32

import numpy as np
import torch

from evenstep.keys import branch_below, key_below

LOSS = crc32(b"loss") | 1 << 40  # as `keys` takes the name "loss", without encoding it each time
_seed_cpu = torch.default_generator.manual_seed
_get_cpu = torch.default_generator.get_state
_set_cpu = torch.default_generator.set_state
_seed_of_cpu = torch.default_generator.initial_seed
_numpy: Any = np.random  # whose stubs lack two functions


def seed_all(device: torch.device, number: int) -> None:
    """Seed the generators of torch (CPU and `device`), Python and numpy with a key."""
    _seed_cpu(number)  # `torch.manual_seed` also walks over all other backends, in 0.3 ms
    if device.type != "cpu":
        seed_device(device, number)
    random.seed(number)
    np.random.seed(number >> 31)  # other bits than Python's: both are Mersenne twisters


def seed_device(device: torch.device, number: int) -> None:
    """Seed the generator of an accelerator."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
    else:
        torch.get_device_module(device).manual_seed(number)


@final
class Randomness:
    """The generators of one run.

    Attributes:
        by_layer: True where the layers are known, so that the loss has a key of its own.
        in_pass: True while layers of a micro-batch are called in the order of their keys.
        begun: number of micro-batches begun.
    """

    def __init__(self) -> None:
        self.by_layer = False
        self.in_pass = False
        self.begun = 0
        self._device = torch.device("cpu")
        self._state = 0
        self._numpys: list[np.random.BitGenerator] = []  # of `undisturbed`, free to be used again

    @contextmanager
    def undisturbed(self, device: torch.device) -> Generator[None]:
        """Restore all generators at the end of the `with`."""
        torchs: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":
            torchs = torch.random.fork_rng([device])
        # numpy's state takes 65 µs to read, and as long to write; another generator in its place takes 1 µs
        numpys = _numpy.get_bit_generator()
        mine = self._numpys.pop() if self._numpys else np.random.MT19937()
        _numpy.set_bit_generator(mine)
        python = random.getstate()
        cpu = _get_cpu()
        try:
            with torchs:
                yield
        finally:
            _set_cpu(cpu)
            random.setstate(python)
            _numpy.set_bit_generator(numpys)
            self._numpys.append(mine)

    @contextmanager
    def keyed(self, device: torch.device, number: int) -> Generator[None]:
        """Generators seeded with the key `number`; their states are restored afterwards."""
        with self.unkeyed(), self.undisturbed(device):
            seed_all(device, number)
            yield

    @contextmanager
    def unkeyed(self) -> Generator[None]:
        """Layers that are called inside are not seeded, as their order has no keys."""
        outer = self.in_pass
        self.in_pass = False
        try:
            yield
        finally:
            self.in_pass = outer

    def begin(self, device: torch.device, state: int) -> None:
        """A micro-batch begins; `state` is the branch of its keys."""
        self._device = device
        self._state = state
        self.in_pass = True
        self.begun += 1
        seed_all(device, key_below(state))

    def seed_layer(self, place: int) -> None:
        """A layer begins, by its place in the model, or the `LOSS`."""
        seed_all(self._device, key_below(self._state, place))

    def begin_layer(self, places: list[int], calls: dict[int, int]) -> None:
        """A layer of a whole model begins.

        Each call in a micro-batch draws other numbers. A forward that is computed again in the backward is the same
        call: torch's generator then has the seed that it had before that.

        Args:
            places: of the layer in the model, one for each call of a forward.
            calls: numbers of its calls in this micro-batch, by the seed of torch's generator before.
        """
        forward, call = divmod(calls.setdefault(_seed_of_cpu(), len(calls)), len(places))
        path = (places[call], forward) if forward else (places[call],)
        seed_all(self._device, key_below(self._state, *path))


def branch_of(state: int, index: int, path: tuple[int, ...]) -> int:
    """Branch of the keys of a micro-batch, or of a part of one, below that of its update."""
    return branch_below(state, index, "part", *path) if path else branch_below(state, index)
