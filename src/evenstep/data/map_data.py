"""Global batches of a map-style dataset, the same for every number of ranks and workers."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, tee
from math import ceil
from typing import NamedTuple, final

from evenstep.data.batch import JSON, Data, GlobalBatch, Microbatch, Position, ReadOptions
from evenstep.data.batching import Lengths, Oversized
from evenstep.data.dataset import MapDataset, count_samples, fingerprint_of
from evenstep.data.loader import DEFAULT_COLLATE, Collate, Fetcher, InlineLoader, Reading, Reply, Request, WorkerLoader
from evenstep.data.sampling import Sampling, Sizes, Weights
from evenstep.data.tree import can_pin
from evenstep.errors import DataError

_EPOCHS_KEPT = 2  # prefetching may have reached the next epoch


class _Planned(NamedTuple):
    position: Position
    following: Position
    num_microbatches: int
    num_samples: int
    requests: list[Request]


@final
class MapData(Data):
    """Global batches of a map-style dataset.

    A global batch is cut into numbered micro-batches, and each rank runs consecutive ones. Its samples do not depend on
    the number of ranks. Every sample is in exactly one batch of each epoch, unless samples are drawn by weights; the
    last batch may be short.

    torch's, numpy's and Python's global generators are seeded before each sample from (seed, epoch, sample), so
    augmentation does not depend on workers, ranks or the cut. A dataset with `__getitems__` is read, and seeded, a
    micro-batch at a time; randomness in `collate` depends on the cut.

    Args:
        dataset: has `len(dataset)`, the same in all epochs, and `dataset[i]`. Its `set_epoch(epoch)` is called whenever
            the epoch changes; its `fingerprint` (str, or a method that returns one) is checked on resume.
        global_batch_size: samples of one update, over all ranks; or pairs (n, samples): that many from update n on.
            Give this or `global_batch_tokens`.
        global_batch_tokens: token budget of one update, longest sample × count.
        micro_batch_size: most samples of a micro-batch.
        micro_batch_tokens: token budget of a micro-batch. Without size or budget a global batch is divided evenly among
            the ranks.
        lengths: the length of each sample, in tokens, or a function of its index; needed for token budgets.
        packed: True if `collate` packs samples into rows: the tokens of a batch are the sum over its samples.
        oversized: "error" for a sample longer than a budget, or "skip", which leaves it out and counts it.
        shuffle: whether epochs are shuffled.
        sampling: a weight for each sample: an epoch then draws `len(dataset)` samples with replacement. Or a
            `WeightedRandomSampler` of torch, for its number of draws, also without replacement.
        collate: makes a batch from a list of samples.
        num_workers: processes that read samples ahead; 0 reads in this process.
        reading: how far ahead they read, and what to do about samples that fail.
        num_epochs: number of epochs after which `batches` ends; None for never.
        limit_batches: most global batches of an epoch, to try things out; None for no limit.

    Raises:
        ArgumentError: an argument is wrong, or the dataset is empty.
        DataError: a sample is longer than a budget.

    >>> data = MapData([10, 11, 12, 13, 14], global_batch_size=2, shuffle=False, num_epochs=1)
    >>> [batch.microbatches[0].data.tolist() for batch in data.batches(ReadOptions(seed=1))]
    [[10, 11], [12, 13], [14]]
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        global_batch_size: Sizes = None,
        global_batch_tokens: int | None = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        lengths: Lengths | None = None,
        packed: bool = False,
        oversized: Oversized = "error",
        shuffle: bool = True,
        sampling: Weights = None,
        collate: Collate = DEFAULT_COLLATE,
        num_workers: int = 0,
        reading: Reading = Reading(),
        num_epochs: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        self._sampling = Sampling(
            num_samples=count_samples(dataset),
            global_batch_size=global_batch_size,
            global_batch_tokens=global_batch_tokens,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            lengths=lengths,
            packed=packed,
            oversized=oversized,
            shuffle=shuffle,
            sampling=sampling,
        )
        self.limit_batches = limit_batches
        self._dataset = dataset
        self._collate = collate
        self._num_workers = num_workers
        self._reading = reading
        self._num_epochs = num_epochs
        self._fingerprint: dict[str, JSON] | None = None
        self._epoch = lru_cache(_EPOCHS_KEPT)(self._sampling.epoch)
        self._loaders: list[WorkerLoader] = []  # whose processes serve the next reader

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch."""
        return self._sampling.num_samples - self._sampling.num_skipped

    @property
    def num_skipped(self) -> int:
        """Number of samples left out of every epoch because they are longer than a token budget."""
        return self._sampling.num_skipped

    def num_batches(self, epoch: int, *, seed: int) -> int:
        return self._epoch(epoch, seed=seed, limit=self.limit_batches).num_batches

    def fingerprint(self) -> dict[str, JSON]:
        """The dataset's own fingerprint, its size and lengths, and all options that choose the samples of an update."""
        if self._fingerprint is None:  # made once: every checkpoint contains it
            dataset = fingerprint_of(self._dataset)
            self._fingerprint = {"kind": "map", "dataset": dataset, **self._sampling.fingerprint()}
        limit: dict[str, JSON] = {} if self.limit_batches is None else {"limit_batches": self.limit_batches}
        return {**self._fingerprint, **limit}

    def batches(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        start = read.start
        if start.batch and start.batch >= self.num_batches(start.epoch, seed=read.seed):
            raise DataError(
                f"the data can't start at batch {start.batch} of epoch {start.epoch}, which has "
                f"{self.num_batches(start.epoch, seed=read.seed)}; give the dataset and batch size of the checkpoint."
            )
        return self._generate(read)

    def close(self) -> None:
        while self._loaders:
            self._loaders.pop().close()

    @contextmanager
    def _loader(self, microbatches_per_batch: int, *, pins: bool) -> Generator[InlineLoader | WorkerLoader]:
        fetcher = Fetcher(self._dataset, self._collate, self._reading, packed=self._sampling.packed)
        if self._num_workers == 0:
            yield InlineLoader(fetcher, pins=pins)
            return
        loader = next((one for one in self._loaders if not one.in_use and one.pins == pins), None)
        if loader is None:
            prefetch = max(1, ceil(self._reading.prefetch_batches * microbatches_per_batch / self._num_workers))
            loader = WorkerLoader(
                fetcher,
                num_workers=self._num_workers,
                prefetch=prefetch,
                timeout_s=self._reading.timeout_s,
                pins=pins,
            )
            self._loaders.append(loader)
        loader.in_use = True
        try:
            yield loader
        finally:
            loader.in_use = False
            if loader.is_lost and loader in self._loaders:
                self._loaders.remove(loader)
                loader.close()

    def _generate(self, read: ReadOptions) -> Iterator[GlobalBatch]:
        plan = self._plan(read)
        first = next(plan, None)
        if first is None:
            return
        plan, ahead = tee(chain([first], plan))
        in_columns = self._collate is DEFAULT_COLLATE
        with self._loader(len(first.requests), pins=read.pin_memory and can_pin()) as loader:
            loader.start(request for planned in ahead for request in planned.requests)
            for planned in plan:
                replies = loader.take(len(planned.requests))
                pairs = zip(planned.requests, replies, strict=True)
                microbatches = [_microbatch(*pair, in_columns=in_columns) for pair in pairs]
                yield GlobalBatch(
                    position=planned.position,
                    following=planned.following,
                    microbatches=tuple([microbatch for microbatch in microbatches if microbatch.num_samples]),
                    num_microbatches=planned.num_microbatches,
                    num_samples=planned.num_samples,
                    ends_epoch=planned.following.batch == 0,
                    faults=tuple([fault for reply in replies for fault in reply.faults]),
                )

    def _plan(self, read: ReadOptions) -> Iterator[_Planned]:
        position = read.start
        modulo = 0 if self._sampling.draws is None else self._sampling.num_samples
        while self._num_epochs is None or position.epoch < self._num_epochs:
            epoch = self._epoch(position.epoch, seed=read.seed, limit=self.limit_batches)
            samples = epoch.batch(position.batch)
            microbatches = self._sampling.microbatches(samples, read.ranks)
            following = position.after(ends_epoch=position.batch + 1 == epoch.num_batches)
            requests = [
                Request(position.epoch, position.batch, number, microbatches[number], epoch.key, modulo)
                for number in read.share(len(microbatches))
            ]
            # A rank without a micro-batch asks for an empty one: else its loader would look for its next request
            # through all epochs to come.
            requests = requests or [Request(position.epoch, position.batch, 0, [], epoch.key)]
            yield _Planned(position, following, len(microbatches), len(samples), requests)
            position = following


def _microbatch(request: Request, reply: Reply, *, in_columns: bool) -> Microbatch:
    if reply.failure is not None:
        raise reply.failure.error()
    samples = request.indices
    left_out = {sample for fault in reply.faults if fault.num_skipped for sample in fault.samples}
    if left_out:
        samples = [sample for sample in samples if sample not in left_out]
    return Microbatch(
        index=request.microbatch,
        data=reply.data,
        num_samples=reply.num_samples,
        samples=samples if reply.num_samples == len(samples) else (),
        in_columns=in_columns,
    )
