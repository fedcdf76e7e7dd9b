"""Global batches of a map-style dataset, the same for every number of ranks and workers."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain, pairwise, tee
from typing import Any, NamedTuple, cast, final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import WeightedRandomSampler

from evenstep.arguments import check_one_of_two, require_whole
from evenstep.data import batching
from evenstep.data.batch import JSON, Data, DataFault, GlobalBatch, Microbatch, ReadOptions
from evenstep.data.batching import Lengths, Sizes
from evenstep.data.dataset import count_samples, fingerprint_of
from evenstep.data.loader import DEFAULT_COLLATE, Collate, Fetcher, Reading, Reply, Request, WorkerLoader, read_here
from evenstep.data.order import Draws, Order, order_of
from evenstep.data.tree import can_pin
from evenstep.errors import ArgumentError, DataError
from evenstep.keys import key

_EPOCHS_KEPT = 2  # prefetching may have reached the next epoch
_LENGTH_WINDOW = 8192  # shuffled samples that are sorted by length together


class Epoch(NamedTuple):
    """The global batches of an epoch: batch b holds the places of the order from `edges[b]` up to `edges[b + 1]`.

    Args:
        key: seeds the random numbers of the samples.
    """

    visited: Order
    num_samples: int
    edges: Sequence[int]
    key: int

    @property
    def num_batches(self) -> int:
        return len(self.edges) - 1

    def batch(self, number: int) -> NDArray[np.int64]:
        """Samples of global batch `number`."""
        return self.visited(self.edges[number], min(self.edges[number + 1], self.num_samples))


@final
class MapData(Data):
    """Global batches of a map-style dataset.

    Every sample is in one batch of each epoch, unless samples are drawn by weights; the last batch may be short.
    torch's, numpy's and Python's global generators are seeded before each sample from (seed, epoch, sample), so
    augmentation does not depend on workers, ranks or the cut. A dataset with `__getitems__` is read, and seeded, a
    micro-batch at a time; randomness in `collate` depends on the cut.

    Args:
        dataset: has `len(dataset)`, the same in all epochs, and `dataset[i]`. Its `set_epoch(epoch)` is called whenever
            the epoch changes; its `fingerprint` (str, or a method that returns one) is checked on resume.
        global_batch_size: samples of one update, over all ranks; or pairs (n, samples): that many from update n on.
        global_batch_tokens: in place of that, token budget of one update, longest sample × count.
        micro_batch_size: most samples of a micro-batch; without size or budget ranks divide a global batch evenly.
        micro_batch_tokens: token budget of a micro-batch.
        lengths: of each sample, in tokens, or a function of its index; needed for token budgets.
        packed: True if `collate` packs samples into rows: the tokens of a batch are the sum over its samples.
        shuffle: whether epochs are shuffled.
        sampling: a weight for each sample: an epoch then draws `len(dataset)` samples with replacement. Or a
            `WeightedRandomSampler` of torch, for its number of draws, also without replacement.
        collate: makes a batch from a list of samples.
        num_workers: processes that read samples ahead; 0 reads in this process.
        reading: how far ahead they read, and what to do about samples that fail.
        limit_batches: most global batches of an epoch, to try things out; None for no limit.

    >>> batches = MapData([10, 11, 12, 13, 14], global_batch_size=2, shuffle=False).batches(ReadOptions(seed=1))
    >>> [next(batches).microbatches[0].data.tolist() for _ in range(4)]
    [[10, 11], [12, 13], [14], [10, 11]]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: Sizes = None,
        global_batch_tokens: int | None = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        lengths: Lengths | None = None,
        packed: bool = False,
        shuffle: bool = True,
        sampling: Sequence[float] | Tensor | WeightedRandomSampler | None = None,
        collate: Collate = DEFAULT_COLLATE,
        num_workers: int = 0,
        reading: Reading = Reading(),
        limit_batches: int | None = None,
    ) -> None:
        check_one_of_two("global_batch_size", "global_batch_tokens", global_batch_size, global_batch_tokens)
        self.limit_batches = limit_batches
        self._dataset = dataset
        self.num_samples = count_samples(dataset)
        self._pairs = () if global_batch_size is None else batching.pairs_of("global_batch_size", global_batch_size)
        self._tokens = _whole("global_batch_tokens", global_batch_tokens)
        self._micro_size = _whole("micro_batch_size", micro_batch_size)
        self._micro_tokens = _whole("micro_batch_tokens", micro_batch_tokens)
        self._packed = packed
        self._shuffle = shuffle
        self._collate = collate
        self._num_workers = num_workers
        self._reading = reading
        self._lengths: NDArray[np.int64] | None = None  # None without a token budget
        budgets = [one for one in (self._tokens, self._micro_tokens) if one is not None]
        if budgets:
            if lengths is None:
                raise ArgumentError("`lengths` must be given with a token budget, but is None.", field="lengths")
            self._lengths = batching.measure(lengths, self.num_samples, max_tokens=min(budgets))
        self._draws = None if sampling is None else Draws.of(sampling, self.num_samples)
        self._loader: WorkerLoader | None = None  # whose processes serve the next reader
        self._epoch = lru_cache(_EPOCHS_KEPT)(self._epoch_of)

    def num_batches(self, epoch: int, *, seed: int) -> int:
        return self._epoch(epoch, seed, self.limit_batches).num_batches

    def fingerprint(self) -> dict[str, JSON]:
        """The dataset's own fingerprint, its size and lengths, and all options that choose the samples of an update."""
        return {**self._identity, "limit_batches": self.limit_batches}

    @cached_property
    def _identity(self) -> dict[str, JSON]:
        return {
            "kind": "map",
            "dataset": fingerprint_of(self._dataset),
            "num_samples": self.num_samples,
            "global_batch_size": [list(pair) for pair in self._pairs],
            "global_batch_tokens": self._tokens,
            "packed": self._packed and self._tokens is not None,
            "shuffle": self._shuffle,
            "lengths": None if self._lengths is None else crc32(self._lengths.data),
            "draws": None if self._draws is None else self._draws.fingerprint(),
            "cut": {"micro_batch_size": self._micro_size, "micro_batch_tokens": self._micro_tokens},
        }

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        plan = self._plan(read)
        first = next(plan)
        plan, ahead = tee(chain([first], plan))
        batches = (requests for _, requests in ahead)
        with self._replies(batches, len(first[1]), pins=read.pin_memory and can_pin()) as replies:
            for batch, asked in plan:
                faults = batch.faults
                microbatches: list[Microbatch] = []
                for request in asked:
                    reply = next(replies)
                    if isinstance(reply, DataFault):
                        error = DataError(reply.message)
                        error.add_note(reply.details)
                        raise error
                    faults += reply.faults
                    if reply.num_samples:
                        microbatch = Microbatch(
                            index=request.microbatch,
                            data=reply.data,
                            num_samples=reply.num_samples,
                            samples=reply.samples,
                            in_columns=self._collate is DEFAULT_COLLATE,
                        )
                        microbatches.append(microbatch)
                batch.microbatches = tuple(microbatches)
                batch.faults = faults
                yield batch

    def _plan(self, read: ReadOptions) -> Iterator[tuple[GlobalBatch, list[Request]]]:
        """Global batches to be filled, and the micro-batches of each that this rank asks for."""
        position = read.start
        while True:
            epoch = self._epoch(position.epoch, read.seed, self.limit_batches)
            samples = epoch.batch(position.batch)
            cut = self._cut(samples, read.ranks)
            count = len(cut)
            # A rank without a micro-batch asks for an empty one: else its loader would look for its next request
            # through all epochs to come.
            mine = read.share(count) or [count]
            cut.append([])
            requests = [
                Request(*position, number, cut[number], self._indices_of(cut[number]), epoch.key) for number in mine
            ]
            ends_epoch = position.batch + 1 == epoch.num_batches
            batch = GlobalBatch(
                position=position,
                following=position.after(ends_epoch=ends_epoch),
                microbatches=(),
                num_microbatches=count,
                num_samples=len(samples),
            )
            yield batch, requests
            position = batch.following

    def _epoch_of(self, epoch: int, seed: int, limit: int | None) -> Epoch:
        """The first `limit` global batches of an epoch, a pure function."""
        if self._draws is None:
            num_samples = self.num_samples
            visited = order_of(num_samples, seed=seed, epoch=epoch, shuffle=self._shuffle)
        else:
            num_samples = self._draws.num_samples
            visited = self._draws.order(key(seed, "draws", epoch))
        if self._tokens is None:
            edges = batching.cut_by_pairs(self._pairs, num_samples, epoch, limit)
        else:
            every = visited(0, num_samples)
            samples, edges = self._cut_by_tokens(every, self._tokens, key(seed, "batches", epoch))
            visited: Order = lambda start, stop: samples[start:stop]  # noqa: E731
        last = None if limit is None else limit + 1
        return Epoch(visited, num_samples, edges[:last], key(seed, "sample", epoch))

    def _cut_by_tokens(
        self, samples: NDArray[np.int64], max_tokens: int, shuffle_key: int
    ) -> tuple[NDArray[np.int64], list[int]]:
        if self._packed:  # the order needs no lengths that are alike
            return samples, batching.cut_by_sum(self._lengths_of(samples), max_tokens=max_tokens)
        if self._shuffle:
            samples = batching.group_by_length(samples, self._lengths_of(samples), window=_LENGTH_WINDOW)
        edges = batching.cut_by_tokens(self._lengths_of(samples), max_tokens=max_tokens)
        return batching.shuffle_batches(samples, edges, shuffle_key=shuffle_key) if self._shuffle else (samples, edges)

    def _cut(self, samples: NDArray[np.int64], ranks: int) -> list[list[int]]:
        """Micro-batches of a global batch: by tokens (packed, or sorted by length, to pad little), count, or evenly."""
        max_tokens, max_samples = self._micro_tokens, self._micro_size
        if max_tokens is not None:
            lengths = self._lengths_of(samples)
            if self._packed:
                bins = batching.pack(lengths, max_tokens=max_tokens, max_samples=max_samples)
                return [samples[places].tolist() for places in bins]
            order = np.argsort(lengths, kind="stable")
            samples = samples[order]
            edges = batching.cut_by_tokens(lengths[order], max_tokens=max_tokens, max_samples=max_samples)
        else:
            edges = batching.cut_by_count(len(samples), max_samples, ranks=ranks)
        indices: list[int] = samples.tolist()
        return [indices[start:end] for start, end in pairwise(edges)]

    def _indices_of(self, samples: list[int]) -> list[int]:
        return samples if self._draws is None else [sample % self.num_samples for sample in samples]

    def _lengths_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return cast("NDArray[np.int64]", self._lengths)[samples % self.num_samples]

    @contextmanager
    def _replies(
        self, batches: Iterator[list[Request]], per_batch: int, *, pins: bool
    ) -> Generator[Iterator[Reply | DataFault]]:
        fetcher = Fetcher(self._dataset, self._collate, self._reading, packed=self._packed)
        if self._num_workers == 0:
            yield read_here(fetcher, batches, pins=pins)
            return
        loader, self._loader = self._loader, None  # another reader at the same time has processes of its own
        if loader is not None and loader.pins != pins:
            loader.close()
            loader = None
        if loader is None:
            loader = WorkerLoader(fetcher, self._reading, self._num_workers, per_batch, pins=pins)
        try:
            yield loader.read(chain.from_iterable(batches))
        finally:
            if loader.is_lost or self._loader is not None:
                loader.close()
            else:
                self._loader = loader


def _whole(name: str, value: int | None) -> int | None:
    return None if value is None else require_whole(name, value)
