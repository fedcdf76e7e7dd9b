"""Global batches of a stream of samples or of ready-made batches."""

from collections.abc import Callable, Iterable
from typing import Any, cast, final

from evenstep.arguments import require_count
from evenstep.data.batch import JSON, Microbatch, Position
from evenstep.data.batching import cut_by_count, share
from evenstep.data.dataset import fingerprint_of
from evenstep.data.fetch import DEFAULT_COLLATE, Collate
from evenstep.data.iterated_data import Cut, IteratedData, RankReading
from evenstep.data.split import num_arrived, samples_in
from evenstep.data.stream import check_stream
from evenstep.data.stream_ranks import StreamRanks, Total
from evenstep.errors import ArgumentError, DataError, clause

_BY_LOOKS = samples_in


@final
class StreamData(IteratedData):
    """Global batches of an iterable.

    Each epoch iterates the stream again; a run on a generator, which can be iterated only once, ends with it. If the
    stream has `set_epoch(epoch)`, that is called before each epoch. If it has `state_dict` and `load_state_dict`, a run
    resumes without reading the stream from its beginning: the saved state is the one after the last global batch that
    was used, not after items that were read ahead. Whether that state says all, `evenstep prove` finds.

    Random numbers that the stream draws from the global generators of torch, numpy and Python are keyed by (seed,
    epoch, item, rank).

    On several ranks each rank has its own stream, and takes its part of the micro-batches from it. Streams may differ
    in length: an epoch ends for all when the longest one has ended; until then the others take part without samples.
    Such a run can be resumed on the same number of ranks only. With `shared` all ranks have the same stream, read
    the whole of it, and each collates its part of the micro-batches; then the run is that of one process, and can be
    resumed on any number of ranks.

    Args:
        stream: gives samples; or, if `batched`, ready-made batches, each of them a micro-batch.
        global_batch_size: samples of one update, over all ranks; the last of an epoch may be fewer.
        micro_batch_size: the most samples of a micro-batch, not more than of a global batch; None for no limit.
        collate: makes the batch of a list of samples.
        batched: whether the stream gives ready-made batches.
        num_microbatches: ready-made batches of one update, over all ranks; the last of an epoch may be fewer.
        samples_in: the number of samples of a ready-made batch; by default the first dimension of its first part.
        shared: whether all ranks read the same stream, instead of each its own.
        limit_batches: the global batches after which the data end, to try things out; None for no limit.

    Raises:
        ArgumentError: `stream` can't be iterated, or a size is no whole number above 0.

    >>> data = StreamData(range(10), global_batch_size=4)
    >>> batches = data.batches(Position(), seed=1)
    >>> [next(batches).num_samples for _ in range(4)]
    [4, 4, 2, 4]
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        collate: Collate = DEFAULT_COLLATE,
        batched: bool = False,
        num_microbatches: int = 1,
        samples_in: Callable[[Any], int] = samples_in,
        shared: bool = False,
        limit_batches: int | None = None,
    ) -> None:
        check_stream(stream, gives_batches=batched or collate is not DEFAULT_COLLATE)
        if not batched:
            require_count("global_batch_size", global_batch_size)
        super().__init__(stream, limit_batches=limit_batches)
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._collate = collate
        self._batched = batched
        self._num_microbatches = require_count("num_microbatches", num_microbatches)
        self._samples_in, self._counts = samples_in, not batched or samples_in is not _BY_LOOKS
        self._shared = shared

    @property
    def state_is_of_rank(self) -> bool:
        """Whether each rank reads a stream of its own."""
        return not self._shared

    def fingerprint(self) -> dict[str, JSON]:
        """The sizes, and the stream's own `fingerprint`."""
        fingerprint: dict[str, JSON] = {
            "kind": "stream",
            "global_batch_size": self._global_batch_size,
            "batched": self._batched,
            "num_microbatches": self._num_microbatches,
            "stream": fingerprint_of(self._stream),
        }
        return {**fingerprint, "shared": True} if self._shared else fingerprint

    def cut(self) -> dict[str, JSON]:
        return {"micro_batch_size": self._micro_batch_size}

    def _cut(self, items: list[object], reading: RankReading, position: Position) -> Cut:
        if self._batched:
            return self._as_they_come(items, reading)
        edges = cut_by_count(len(items), self._micro_batch_size or max(1, len(items)))
        microbatches: list[Microbatch] = []
        for number in share(len(edges) - 1, rank=reading.rank, ranks=reading.ranks):
            some = items[edges[number] : edges[number + 1]]
            data = self._collated(some, position)
            in_columns = self._collate is DEFAULT_COLLATE
            count = len(some) if in_columns else num_arrived(data, some)
            if count:
                one = Microbatch(index=reading.first + number, data=data, num_samples=count, in_columns=in_columns)
                microbatches.append(one)
        num_microbatches = len(edges) - 1 if reading.num_microbatches is None else reading.num_microbatches
        return Cut(tuple(microbatches), len(items), num_microbatches)

    def _as_they_come(self, items: list[object], reading: RankReading) -> Cut:
        counts = list(map(self._samples_in, items))
        microbatches = [
            Microbatch(
                index=reading.first + number, data=items[number], num_samples=counts[number], counted=self._counts
            )
            for number in share(len(items), rank=reading.rank, ranks=reading.ranks)
        ]
        num_microbatches = len(items) if reading.num_microbatches is None else reading.num_microbatches
        return Cut(tuple(microbatches), sum(counts), num_microbatches)

    def _collated(self, samples: list[object], position: Position) -> object:
        try:
            return self._collate(samples)
        except Exception as error:
            raise DataError(
                f"collating batch {position.batch} of epoch {position.epoch} of the stream raised "
                f"{clause(error)}; make its samples alike, or pass a `collate` function that makes "
                "one batch of a list of them."
            ) from error

    def _reading(self, rank: int, ranks: int, total: Total | None) -> RankReading:
        if self._batched:
            edges = list(range(self._num_microbatches + 1))
        else:
            size = cast(int, self._global_batch_size)
            edges = cut_by_count(size, self._micro_batch_size or size)
        if ranks == 1 or self._shared:
            return RankReading(0, rank, ranks, edges[-1], StreamRanks(total, ranks, shared=True))
        microbatches = share(len(edges) - 1, rank=rank, ranks=ranks)
        if not microbatches:
            finer = (
                "raise `num_microbatches`" if self._batched else "raise the global batch or lower `micro_batch_size`"
            )
            raise ArgumentError(
                f"each of the {ranks} ranks reads its own stream and needs a micro-batch of each global batch, but "
                f"there are {len(edges) - 1}; {finer}, or pass `shared=True` if all ranks read the same stream."
            )
        num_items, num_microbatches = edges[microbatches.stop] - edges[microbatches.start], len(edges) - 1

        def scaled(num_samples: int) -> int:
            if not self._batched and num_samples == num_items:
                return edges[-1]
            return num_samples * num_microbatches // len(microbatches)

        others = StreamRanks(total, ranks, scaled=scaled)
        return RankReading(rank, 0, 1, num_items, others, microbatches.start, num_microbatches)
