"""Number of samples of a batch, and cuts of a batch between samples.

Samples lie along dim 0 of tensors and arrays, or are the items of lists. A task cuts other batches in `Task.split`.
"""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.data.tree import PLAIN, is_container, is_list, leaves, parts, rebuilt
from evenstep.errors import DataError, TaskError


def num_samples(batch: Any, known: int | None = None) -> int | None:
    """Number of samples of `batch`: dim 0 of its tensors, if they share it; None where that is not certain.

    Tensors in a nested list do not count: they may be samples.

    Args:
        known: number of samples that the data have put in; certain unless all tensors have another dim 0.

    >>> features_first = {"x": torch.zeros(6, 8), "y": torch.zeros(8)}
    >>> num_samples(features_first), num_samples(features_first, known=8), num_samples(torch.zeros(6, 8), known=8)
    (None, 8, None)
    """
    rows = {_rows(leaf) for leaf in _columns(batch)}
    if known is None:
        return rows.pop() if len(rows) == 1 else None
    return known if not rows or known in rows or known in _list_lengths(batch) else None


def num_arrived(batch: Any, samples: Sequence[Any]) -> int:
    """Number of samples in a batch collated of `samples`: fewer, where the collate function has left some out."""
    put_in = len(samples)
    if is_list(batch) and batch and any(batch[0] is sample for sample in samples):
        return len(batch)
    columns = _columns(batch)
    rows = {_rows(column) for column in columns}
    parted = parts(batch) if is_container(batch) else []
    has_other_dim = all(put_in in column.shape for column in columns)
    if len(rows) != 1 or has_other_dim or any(put_in in _list_lengths(part) for part in parted):
        return put_in
    return min(put_in, *rows)


def samples_in(batch: object) -> int:
    """Number of samples of a ready-made batch: dim 0 of its tensors, else of its first part."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    count = num_samples(batch)
    if count is not None:
        return count
    part: Any = batch
    if isinstance(part, Mapping) and part:
        return samples_in(next(iter(cast("Mapping[Any, Any]", part).values())))
    if is_list(part) and part and (is_container(part[0]) or hasattr(part[0], "shape")):
        part = part[0]
    shape = getattr(part, "shape", None)
    if shape is not None:
        return int((*shape, 1)[0])
    if isinstance(part, Sized):
        return len(part)
    raise DataError(
        f"a ready-made batch, a {type(batch).__name__}, does not tell how many samples it holds; pass a function that "
        f"does as `samples_in`.",
        field="samples_in",
    )


def halves(batch: Any, known: int | None = None) -> list[Any]:
    """`batch` in two, or as it is where it can't be cut."""
    count = cuttable_samples(batch, known)
    middle = (count + 1) // 2
    return [batch] if count < 2 else [samples_of(batch, 0, middle, count), samples_of(batch, middle, count, count)]


def cuttable_samples(batch: Any, known: int | None = None, *, in_columns: bool = False) -> int:
    """Number of samples that `batch` can be cut into; 1 where it can't be cut.

    Args:
        in_columns: whether lists of tensors in it are columns, as torch's collate function makes them.
    """
    count = max(num_samples(batch, known) or 1, 1)
    try:
        if count > 1:
            _cut(batch, count, slice(0, 1), in_columns)
    except _UncertainError:
        return 1
    return count


def samples_of(batch: Any, first: int, end: int, count: int) -> Any:
    """Samples `first` to `end` of a batch that can be cut in `count`."""
    return _cut(batch, count, slice(first, end), in_columns=True)


class _UncertainError(TaskError):
    pass


def _cut(item: Any, count: int, part: slice, in_columns: bool) -> Any:
    if _is_array(item):
        if item.ndim and _rows(item) == count:
            return item[part]
        if count in item.shape:
            raise _UncertainError
        return item  # a table that all samples share
    if is_list(item) and len(item) == count:
        rows = [_rows(leaf) for _, leaf in leaves(item) if leaf.ndim]
        if not rows or any(one != count for one in rows):
            if count < 4 and isinstance(item, tuple) and all(isinstance(one, int | float) for one in cast("Any", item)):
                raise _UncertainError  # samples, or one value of all
            return item[part]
        if not in_columns and len({(getattr(one, "dtype", None), getattr(one, "ndim", None)) for one in item}) == 1:
            raise _UncertainError  # samples, or their columns
    if is_container(item):
        return rebuilt(item, lambda one: _cut(one, count, part, in_columns))
    is_opaque = hasattr(item, "to") or (isinstance(item, Sized) and not isinstance(item, PLAIN)) or any(leaves(item))
    if is_opaque and not isinstance(item, np.generic):
        raise _UncertainError
    return item


def _rows(array: Any) -> int:
    return int(array.shape[0])


def _is_array(item: Any) -> bool:
    is_plain_tensor = isinstance(item, Tensor) and item.layout == torch.strided and not item.is_nested
    return is_plain_tensor or isinstance(item, np.ndarray)


def _columns(item: Any, *, nested: bool = False) -> list[Any]:
    if _is_array(item):
        return [item] if item.ndim else []
    if not is_container(item) or (nested and is_list(item)):
        return []
    return [column for part in parts(item) for column in _columns(part, nested=True)]


def _list_lengths(item: Any) -> set[int]:
    if not is_container(item):
        return set()
    own = {len(cast("list[Any]", item))} if is_list(item) else set[int]()
    return own.union(*map(_list_lengths, parts(item)))
