"""What people give as data, as `Data`: that itself, or a torch `DataLoader` whose choices are taken over.

Of a loader come its dataset, whether it shuffles, its batch size (which is the global batch), its collate function and
its workers. What evenstep would do otherwise than the loader is refused, with the line to write instead. It reads no
sample.
"""

from typing import Any, NoReturn, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from evenstep.data.batch import Data
from evenstep.data.fetch import Reading
from evenstep.data.map_data import MapData
from evenstep.errors import ArgumentError

_AS_TORCH = ("torch", "torchdata")  # whose loaders give a dataset's batches as they are
_OWN_ORDER = "or keep the loader's batches with `StreamData(loader, batched=True)`, on several ranks also `shared=True`"


def data_of(given: object, argument: str) -> Data:
    """The data that `given` stands for.

    Args:
        given: `Data`, or a `DataLoader` over a dataset with a length.
        argument: that it was given for, for messages.

    Raises:
        ArgumentError: something else, or a loader that does what evenstep would not; it says what to write.

    >>> loader = DataLoader([1.0, 2.0, 3.0], batch_size=2)
    >>> data_of(loader, "data").num_batches(0, seed=1)
    2
    """
    if isinstance(given, Data):
        return given
    if isinstance(given, DataLoader):
        return _of_loader(cast("DataLoader[Any]", given), argument)
    raise ArgumentError(
        f"`{argument}` must be evenstep's `Data` or a `DataLoader`, but is a {type(given).__name__}; write "
        f"`{argument}=MapData(dataset, global_batch_size=32)`, or `StreamData` for what has no length.",
        field=argument,
    )


def _of_loader(loader: "DataLoader[Any]", argument: str) -> MapData:
    if isinstance(loader.dataset, IterableDataset):
        _refuse(argument, "reads a stream", "give its batches as they come, `StreamData(loader, batched=True)`")
    iterates = next(one for one in type(loader).__mro__ if "__iter__" in vars(one))
    if iterates.__module__.partition(".")[0] not in _AS_TORCH:
        own = f"gives its batches by an `__iter__` of {iterates.__name__}"
        _refuse(argument, own, f"give the dataset, `MapData(dataset, global_batch_size=…)`, {_OWN_ORDER}")
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        own = f"makes its batches by a {type(loader.batch_sampler or loader.sampler).__name__} of its own"
        _refuse(argument, own, f"give the dataset, `MapData(dataset, global_batch_size=…)`, {_OWN_ORDER}")
    shuffle = _shuffles(loader, argument)
    num_samples = len(cast("Any", loader.dataset))
    if loader.drop_last and num_samples % loader.batch_size:
        _refuse(
            argument,
            f"drops the last {num_samples % loader.batch_size} samples of an epoch (`drop_last`)",
            "leave that out: a short batch is divided by its own weight, so nothing has to be dropped",
        )
    if loader.worker_init_fn is not None:
        _refuse(
            argument,
            "has a `worker_init_fn`",
            "leave it out: generators are seeded for each sample; or give the dataset, `MapData(dataset, …)`",
        )
    return MapData(
        cast("Any", loader.dataset),
        global_batch_size=loader.batch_size,
        shuffle=shuffle,
        collate=loader.collate_fn,
        num_workers=loader.num_workers,
        reading=Reading(timeout_s=float(loader.timeout)) if loader.timeout else Reading(),  # a loader's 0 is for ever
    )


def _shuffles(loader: "DataLoader[Any]", argument: str) -> bool:
    sampler: object = loader.sampler
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement
    if type(sampler) is RandomSampler and whole and sampler.num_samples == len(cast("Any", loader.dataset)):
        return True
    if type(sampler) is SequentialSampler and len(sampler) == len(cast("Any", loader.dataset)):
        return False
    kind = type(sampler).__name__
    if kind == "DistributedSampler":
        _refuse(
            argument,
            "divides the dataset between ranks by a DistributedSampler, which evenstep does itself",
            "leave the sampler out, and make `batch_size` the batch of all ranks together",
        )
    what = f"takes its samples by a {kind}"
    return _refuse(argument, what, f"give the dataset in an order of evenstep's, `MapData(dataset, …)`, {_OWN_ORDER}")


def _refuse(argument: str, what: str, advice: str) -> NoReturn:
    raise ArgumentError(f"`{argument}` is a DataLoader that {what}, which can't be taken over; {advice}.")
