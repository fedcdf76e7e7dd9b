"""Takes over a torch `DataLoader` as `MapData`: dataset, shuffling, batch size, collate function and workers."""

from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from evenstep.data.batch import Data
from evenstep.data.loader import Reading
from evenstep.data.map_data import MapData
from evenstep.errors import ArgumentError

_AS_TORCH = ("torch", "torchdata")  # whose loaders give a dataset's batches as they are


def data_of(given: object, argument: str) -> Data:
    """`Data`, or a `DataLoader` over a dataset with a length as `MapData`; `argument` is for errors.

    >>> data_of(DataLoader([1.0, 2.0, 3.0], batch_size=2), "data").num_batches(0, seed=1)
    2
    """
    if isinstance(given, Data):
        return given
    if isinstance(given, DataLoader):
        return _of_loader(cast("DataLoader[Any]", given), argument)
    raise ArgumentError(
        f"`{argument}` must be evenstep's `Data` or a `DataLoader`, but is a {type(given).__name__}; write "
        f"`{argument}=MapData(dataset, global_batch_size=32)`, or `StreamData` for a stream.",
        field=argument,
    )


def _of_loader(loader: "DataLoader[Any]", argument: str) -> MapData:
    if why := _own_choice(loader):
        raise ArgumentError(
            f"`{argument}` is a DataLoader with {why}, which can't be taken over; give its dataset to "
            "`MapData`, or its batches as they come, `StreamData(loader, batched=True)`.",
            field=argument,
        )
    return MapData(
        cast("Any", loader.dataset),
        global_batch_size=loader.batch_size,
        shuffle=isinstance(loader.sampler, RandomSampler),
        sampling=_weighted(loader),
        collate=loader.collate_fn,
        num_workers=loader.num_workers,
        reading=Reading(timeout_s=float(loader.timeout)) if loader.timeout else Reading(),  # a loader's 0 is for ever
    )


def _weighted(loader: "DataLoader[Any]") -> WeightedRandomSampler | None:
    sampler: object = loader.sampler
    if type(sampler) is WeightedRandomSampler:
        return sampler
    if type(sampler) is RandomSampler and sampler.replacement:
        return WeightedRandomSampler([1.0] * len(cast("Any", loader.dataset)), sampler.num_samples)
    return None


def _own_choice(loader: "DataLoader[Any]") -> str:
    if isinstance(loader.dataset, IterableDataset):
        return "a stream"
    iterates = next(one for one in type(loader).__mro__ if "__iter__" in vars(one))
    if iterates.__module__.partition(".")[0] not in _AS_TORCH:
        return f"an `__iter__` of {iterates.__name__}"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return f"a {type(loader.batch_sampler or loader.sampler).__name__} of its own"
    sampler: Any = loader.sampler
    num_samples = len(cast("Any", loader.dataset))
    weighted = _weighted(loader)
    visits_all = type(sampler) in (RandomSampler, SequentialSampler) and len(sampler) == num_samples
    if weighted is None and not visits_all:
        return f"a {type(sampler).__name__}"
    if loader.drop_last and len(sampler) % loader.batch_size:
        return "`drop_last`, though no sample need be dropped"
    return "a `worker_init_fn`" if loader.worker_init_fn is not None else ""
