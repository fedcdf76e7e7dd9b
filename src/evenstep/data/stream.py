"""What can be asked of a stream: its state, its `set_epoch`, and how many samples a batch of it holds.

It reads nothing; `StreamData` does.
"""

from collections.abc import Callable, Mapping, Sized
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from evenstep.data.dataset import epoch_setters
from evenstep.errors import ArgumentError, DataError


@runtime_checkable
class Stateful(Protocol):
    """A stream that can say where it is and go there; torchdata's `StatefulDataLoader` is one.

    After `load_state_dict(state)` the next `iter()` must go on with the item after the last that was given when
    `state_dict()` gave `state`.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


def check_stream(stream: object, *, gives_batches: bool) -> None:
    """Check that `stream` is something to iterate, whose items are what they are taken for.

    Args:
        gives_batches: whether its items may be batches of samples.
    """
    name = type(stream).__name__
    if isinstance(stream, str | bytes | Mapping) or not hasattr(stream, "__iter__"):
        raise ArgumentError(
            f"`stream` must give samples when it is iterated, but is a {name}; open or call what makes them, or feed "
            "a dataset that gives samples by number with `MapData`.",
            field="stream",
        )
    if not gives_batches and isinstance(stream, DataLoader) and (cast(Any, stream).batch_size or 0) > 1:
        size = cast(Any, stream).batch_size
        raise ArgumentError(
            f"`stream` must give samples, but this {name} gives batches of {size}; pass `batched=True` and "
            f"`num_microbatches`, make it with `batch_size=None`, or give its dataset to `MapData`, which shuffles, "
            "batches, reads ahead and resumes by itself."
        )


def stream_epoch_setters(stream: object) -> list[Callable[[int], object]]:
    """Every `set_epoch` that is to be told of a new epoch: the stream's, or those inside a `DataLoader`."""
    setters = epoch_setters(stream)
    if setters or not isinstance(stream, DataLoader):
        return setters
    loader = cast(Any, stream)  # torch leaves the types of its samplers open
    of_dataset = epoch_setters(loader.dataset)
    if of_dataset and loader.persistent_workers:
        raise ArgumentError(
            "a DataLoader with `persistent_workers=True` never tells its workers of a new epoch, but its dataset has "
            "`set_epoch`; turn `persistent_workers` off, or give the dataset to `MapData`."
        )
    return of_dataset + epoch_setters(loader.sampler) + epoch_setters(loader.batch_sampler)


def samples_in(batch: object) -> int:
    """How many samples a ready-made batch holds: the first dimension of its first part.

    Raises:
        DataError: the batch does not tell.

    >>> import torch
    >>> samples_in([torch.zeros(8, 3), torch.zeros(8)]), samples_in({"text": ["a", "b"]})
    (8, 2)
    """
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    pair: Any = batch
    # asked first: it is the commonest, and this runs once per micro-batch
    part = pair[0] if isinstance(batch, (tuple, list)) and pair else None
    if not isinstance(part, Tensor):
        part = _first_part(batch)
    if isinstance(part, Tensor):
        return part.size(0) if part.ndim else 1
    shape = cast("tuple[int, ...]", getattr(part, "shape", ()))
    if shape:
        return int(shape[0])
    if isinstance(part, Mapping) and part:
        return samples_in(cast(object, part))
    if isinstance(part, Sized):
        return len(cast(Sized, part))
    raise DataError(
        f"a ready-made batch, a {type(batch).__name__}, does not tell how many samples it holds; pass a function that "
        "does as `samples_in`."
    )


def _first_part(batch: object) -> object:
    if isinstance(batch, (tuple, list)) and batch:
        first: Any = batch[0]
        if isinstance(first, Tensor) or hasattr(first, "shape") or isinstance(first, (tuple, list, Mapping)):
            return first
    elif not isinstance(batch, Tensor) and isinstance(batch, Mapping):
        mapping = cast(Mapping[object, object], batch)
        return next(iter(mapping.values()), mapping)
    return cast(object, batch)
