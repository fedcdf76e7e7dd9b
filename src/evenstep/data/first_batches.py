"""The first global batches of each epoch of other data: for trying out, or for evaluations in between.

Position (e, b) is that of the other data, so what is trained on is the beginning of what the whole run would be; an
epoch ends after so many of them, or where that of the other data does. It reads nothing itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, final

from evenstep.arguments import require_whole
from evenstep.data.batch import JSON, Data, GlobalBatch, Position
from evenstep.data.resolve import data_of
from evenstep.data.wrapped import WrappedData
from evenstep.errors import DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@final
class FirstBatches(WrappedData):
    """The first `batches` global batches of each epoch of `data`; of a stream, which has but one pass, of that.

    Args:
        data: any, also a `DataLoader`.
        batches: how many, of each epoch.

    Raises:
        ArgumentError: nothing that is such data, or a number below 1.

    >>> from evenstep.data import MapData
    >>> data = FirstBatches(MapData([10, 11, 12, 13, 14], global_batch_size=2, shuffle=False, num_epochs=2), 2)
    >>> [(tuple(one.position), one.ends_epoch) for one in data.batches(Position(), seed=1)]
    [((0, 0), False), ((0, 1), True), ((1, 0), False), ((1, 1), True)]
    """

    def __init__(self, data: "Data | DataLoader[Any]", batches: int) -> None:
        require_whole("batches", batches)
        super().__init__(data_of(data, "data"))
        self._batches = batches

    def num_batches(self, epoch: int, *, seed: int) -> int | None:
        count = self.data.num_batches(epoch, seed=seed)
        return None if count is None else min(count, self._batches)

    def fingerprint(self) -> dict[str, JSON]:
        return {"kind": "first", "batches": self._batches, "data": self.data.fingerprint()}

    @property
    def resumable(self) -> bool:
        return self.data.resumable and self.data.knows_length

    def through(self, start: Position, read: Callable[[Position], Iterator[GlobalBatch]]) -> Iterator[GlobalBatch]:
        position: Position | None = start
        if position.batch >= self._batches:
            raise DataError(
                f"the data cannot start at batch {position.batch} of epoch {position.epoch}, of which only the first "
                f"{self._batches} are taken; raise that number, or start a new run."
            )
        while position is not None:
            self._check_sizes(position)
            batches = read(position)
            position = None
            with closing(cast("Any", batches)):
                for batch in batches:
                    if batch.ends_epoch or batch.position.batch + 1 < self._batches:
                        yield batch
                        continue
                    following = Position(batch.position.epoch + 1, 0)
                    yield replace(batch, following=following, ends_epoch=True)
                    position = following if self.data.knows_length else None
                    break

    def _check_sizes(self, position: Position) -> None:
        """Raise DataError behind an epoch that was cut short, where sizes change with the number of the update."""
        if not position.epoch or not _counts_updates(self.data.fingerprint()):
            return
        if any((self.data.num_batches(one, seed=0) or 0) > self._batches for one in {0, position.epoch - 1}):
            raise DataError(
                f"epoch {position.epoch + 1} of `FirstBatches(…, {self._batches})` cannot begin: sizes that change by "
                f"updates count the global batches of the data that it is made of, also those that it leaves out, and "
                f"would change at other updates than the named ones. Let them change by epochs "
                f"(`batch_size_unit='epochs'`), or take no more updates than the first epoch has."
            )


def _counts_updates(fingerprint: JSON) -> bool:
    """Whether sizes that change by updates are in a fingerprint; those of one are kept as a `unit` and `sizes`."""
    if isinstance(fingerprint, Mapping):
        by_updates = fingerprint.get("unit") == "updates" and "sizes" in fingerprint
        return by_updates or any(map(_counts_updates, fingerprint.values()))
    return isinstance(fingerprint, list | tuple) and any(map(_counts_updates, fingerprint))
