"""Properties of map-style datasets, also inside torch's `Subset` and `ConcatDataset`."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from evenstep.data.batch import JSON
from evenstep.errors import ArgumentError


def count_samples(dataset: object) -> int:
    """Number of samples of a map-style dataset, at least 1."""
    name = type(dataset).__name__
    is_table = isinstance(dataset, Mapping) and 0 not in dataset
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_map or is_table or isinstance(dataset, str | bytes | IterableDataset):
        raise ArgumentError(
            f"`dataset` must have `dataset[i]` and `len(dataset)`, but is a {name}; give a DataLoader's `.dataset`, or "
            f"feed a stream with `StreamData`.",
            field="dataset",
        )
    num_samples = len(cast("Any", dataset))
    if not num_samples:
        raise ArgumentError(f"`dataset` must hold at least one sample, but this {name} is empty.", field="dataset")
    return num_samples


def with_set_epoch(dataset: Any) -> list[Any]:
    """The dataset or loader, or the parts that it is made of, if they have `set_epoch`."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    parts: Sequence[Any] = ()
    if isinstance(dataset, Subset):
        parts = [cast("Any", dataset).dataset]
    elif isinstance(dataset, ConcatDataset):
        parts = cast("Any", dataset).datasets
    elif isinstance(dataset, DataLoader):
        loader = cast("Any", dataset)
        parts = [loader.dataset, loader.sampler, loader.batch_sampler]
    return [one for part in parts for one in with_set_epoch(part)]


def fetches_many(dataset: object) -> bool:
    # a `Subset` has a `__getitems__` that its dataset may lack
    return callable(getattr(_innermost(dataset), "__getitems__", None))


def draws_nothing(dataset: object) -> bool:
    return type(_innermost(dataset)) in (TensorDataset, list, tuple, range, np.ndarray, Tensor)


def _innermost(dataset: object) -> object:
    while type(dataset) is Subset:
        dataset = cast("Subset[object]", dataset).dataset
    return dataset


def fingerprint_of(dataset: object) -> JSON:
    """The dataset's own `fingerprint` attribute or method, and the choice of a `Subset`; None if it has none.

    >>> fingerprint_of(Subset(TensorDataset(torch.zeros(9)), [1, 2]))
    {'subset': 16178617, 'of': None}
    """
    fingerprint = getattr(dataset, "fingerprint", None)
    if callable(fingerprint):
        fingerprint = fingerprint()
    if fingerprint is not None:
        return json.loads(json.dumps(fingerprint))
    if isinstance(dataset, Subset):
        subset = cast("Subset[object]", dataset)
        chosen = np.asarray(subset.indices, dtype=np.int64)
        return {"subset": crc32(chosen.tobytes()), "of": fingerprint_of(subset.dataset)}
    return None


def rows_of(dataset: object) -> Callable[[list[int]], list[Tensor]] | None:
    """Reader of many rows of a `TensorDataset` or a `Subset` of one, collated; 256 rows take 0.03 ms instead of 15."""
    choices: list[Sequence[int]] = []
    while type(dataset) is Subset:
        choices.append(cast("Subset[object]", dataset).indices)
        dataset = cast("Subset[object]", dataset).dataset
    # no closure: it is pickled for workers
    return partial(_rows, dataset.tensors, choices) if type(dataset) is TensorDataset else None


def _rows(tensors: Sequence[Tensor], choices: list[Sequence[int]], rows: list[int]) -> list[Tensor]:
    for choice in choices:
        rows = [choice[row] for row in rows]
    places = np.array(rows)
    places[places < 0] += len(tensors[0])
    index = torch.as_tensor(places)  # a third of the time of torch.tensor(rows)
    return [tensor.index_select(0, index) for tensor in tensors]
