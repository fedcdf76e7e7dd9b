"""Number of samples of a batch, and cuts of a batch between samples.

Samples are rows of tensors and arrays, or items of lists. A batch that can be read in two ways is not cut; a task can
cut it in `Task.split`.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from pathlib import PurePath
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from evenstep.arguments import first_of, format_name
from evenstep.tensors import is_dense

_PLAIN = (str, bytes, bool, int, float, complex, Enum, PurePath, torch.Size, torch.dtype, torch.device, slice)


def num_samples(batch: Any, known: int | None = None) -> int | None:
    """Number of samples of `batch`; None where that is not certain.

    Args:
        known: their number as the data tell it; it is taken unless all tensors say something else.

    >>> import torch
    >>> num_samples({"name": ["a", "b"], "x": (torch.tensor(1.0), torch.zeros(2, 5))})
    2
    >>> features_first = {"x": torch.zeros(6, 8), "y": torch.zeros(8)}
    >>> num_samples(features_first), num_samples(features_first, known=8), num_samples(torch.zeros(6, 8), known=8)
    (None, 8, None)
    """
    lengths = {length for _, _, length in _rows_in(batch)}
    if known is None:
        return lengths.pop() if len(lengths) == 1 and not _ragged(batch) else None
    return known if not lengths or known in lengths or known in _sequence_lengths(batch) else None


def samples_in(parts: Sequence[Any], whole: Any, count: int) -> list[int | None]:
    """Numbers of samples of the parts of a batch of `count`, from the tensors with one row per sample.

    >>> import torch
    >>> batch = lambda n: {"x": torch.zeros(6, n), "y": torch.zeros(n)}
    >>> samples_in([batch(3), batch(5)], batch(8), 8), samples_in([torch.zeros(6, 3)], torch.zeros(6, 8), 8)
    ([3, 5], [None])
    """
    places = [path for path, one in _arrays_in(whole, "") if _rows(one) == count]
    lengths = [{path: _rows(one) or 0 for path, one in _arrays_in(part, "")} for part in parts]
    found = {tuple(one.get(path, -1) for one in lengths) for path in places}
    found = {told for told in found if -1 not in told and sum(told) == count}
    return list(found.pop()) if len(found) == 1 else [None] * len(parts)


def contents(batch: Any, *, formats: bool = False) -> str:
    """Shapes of the tensors of `batch`, for messages.

    >>> import torch
    >>> contents({"x": torch.zeros(6, 8), "y": torch.zeros(8)})
    '`x` [6, 8], `y` [8]'
    >>> contents(torch.zeros(2, 3), formats=True)
    'float32 [2, 3]'
    """
    found = [
        (f"`{path}` " if path else "") + (f"{format_name(one.dtype)} " if formats else "") + str(list(one.shape))
        for path, one, _ in _rows_in(batch)
    ]
    return first_of(found, 4) if found else f"a {type(batch).__name__}"


def num_elements(batch: Any) -> int:
    """Number of elements of the tensors of `batch`, which its memory grows with."""
    return sum(leaf.size if isinstance(leaf, np.ndarray) else leaf.numel() for _, leaf in _arrays_in(batch, ""))


def tensors_in(item: Any) -> list[Tensor]:
    """The tensors of a batch, also those that are attributes of its objects, in order."""
    return [leaf for _, leaf in _arrays_in(item, "") if isinstance(leaf, Tensor)]


def halves(batch: Any, known: int | None = None) -> list[Any]:
    count = cuttable_samples(batch, known)
    if count < 2:
        return [batch]
    middle = half_of_samples(count)
    return [samples_of(batch, 0, middle, count), samples_of(batch, middle, count, count)]


def cuttable_samples(batch: Any, known: int | None = None, *, in_columns: bool = False) -> int:
    """Number of samples that `batch` can be cut into; 1 where it can't be cut.

    Args:
        in_columns: whether lists of tensors in it are known to be columns, and not samples.

    >>> import torch
    >>> two = [torch.zeros(2, 4), torch.zeros(2, 1)]
    >>> cuttable_samples(two, 2), cuttable_samples(two, 2, in_columns=True)
    (1, 2)
    """
    count = _count(batch, known)
    return 1 if count is None or _obstacle(batch, count, "", in_columns) else max(count, 1)


def half_of_samples(count: int) -> int:
    """Number of samples in the first half of `count`."""
    return (count + 1) // 2


def samples_of(batch: Any, first: int, end: int, count: int) -> Any:
    """Samples `first` to `end` of a batch that can be cut in `count`."""
    if _rows(batch) == count or _is_samples(batch, count):
        return batch[first:end]
    return rebuilt(batch, lambda one: samples_of(one, first, end, count)) if _is_container(batch) else batch


def why_whole(batch: Any, known: int | None = None, *, in_columns: bool = False) -> str:
    """Why `halves` does not cut a batch, for messages; "" where it does, or where there is one sample only.

    >>> import torch
    >>> why_whole({"x": torch.zeros(6, 8), "y": torch.zeros(8)}, known=8)
    '`x` [6, 8] has the 8 samples in dim 1'
    """
    count = _count(batch, known)
    if count is None:
        return f"it does not tell how many samples it holds: {contents(batch)}"
    return "" if count < 2 else _obstacle(batch, count, "", in_columns)


def copied(item: Any) -> Any:
    """The same batch with tensors and containers of its own; an object that has no copy is shared.

    >>> import torch
    >>> batch = {"x": torch.zeros(2), "names": ["a", "b"]}
    >>> twin = copied(batch); twin["x"] += 1; _ = twin.pop("names"); batch
    {'x': tensor([0., 0.]), 'names': ['a', 'b']}
    """
    if isinstance(item, Tensor):
        return item.detach().clone()
    if _is_container(item):
        return rebuilt(item, copied)
    try:
        return copy.deepcopy(item)
    except Exception:  # noqa: BLE001 - such as a lock or an open file
        return item


def checksums(item: Any) -> dict[str, int]:
    """A number for the bits of each tensor and array of a batch, by its path, also on a device.

    >>> import torch
    >>> one, other = {"x": torch.zeros(2), "y": np.ones(3)}, {"x": torch.zeros(2, 3)[:, 0], "y": np.ones((3, 1))}
    >>> [path for path, bits in checksums(one).items() if checksums(other)[path] != bits]
    ['y']
    """
    found: dict[str, int] = {}
    for path, part in _arrays_in(item, ""):
        array = part
        if isinstance(part, Tensor) and is_dense(part):
            packed = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
            array = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8).numpy()
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            found[path] = crc32(np.ascontiguousarray(array).data, crc32(repr((part.shape, part.dtype)).encode()))
    return found


def rebuilt(item: Any, act: Callable[[Any], Any]) -> Any:
    """A container of the same kind that holds what `act` makes of the parts of `item`."""
    if isinstance(item, Mapping):
        mapping = cast("Mapping[Any, Any]", item)
        made = {name: act(value) for name, value in mapping.items()}
        return made if type(mapping) is dict else _mapping_like(mapping, made)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return cast("Any", type(item))(*map(act, cast("tuple[Any, ...]", item)))
    if isinstance(item, tuple | list):
        return type(item)(map(act, cast("list[Any]", item)))
    made = copy.copy(item)
    for field in dataclasses.fields(item):
        object.__setattr__(made, field.name, act(getattr(item, field.name)))  # it may be frozen
    return made


def _mapping_like(mapping: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    try:
        return cast("Any", type(mapping))(made)
    except TypeError:  # made of something else, such as a defaultdict
        twin: Any = copy.copy(mapping)
        twin.update(made)
        return twin


def _rows(item: Any) -> int | None:
    return int(item.shape[0]) if isinstance(item, Tensor | np.ndarray) and _is_plain(item) and item.ndim else None


def _is_plain(item: Any) -> bool:
    return isinstance(item, np.ndarray) or (item.layout == torch.strided and not item.is_nested)


def _rows_in(item: Any, path: str = "") -> Iterator[tuple[str, Any, int]]:
    if (length := _rows(item)) is not None:
        yield path, item, length
    elif _is_container(item):
        for name, part in _named_parts(item, path):
            yield from _rows_in(part, name)


def _arrays_in(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Tensor | np.ndarray):
        yield path, item
    elif _is_container(item):
        for name, part in _named_parts(item, path):
            yield from _arrays_in(part, name)
    elif not isinstance(item, (*_PLAIN, type)) and not callable(item):
        for name, value in getattr(item, "__dict__", {}).items():
            if isinstance(value, Tensor | np.ndarray):
                yield f"{path}.{name}", value


def _count(batch: Any, known: int | None) -> int | None:
    count = num_samples(batch, known)
    if count is None and known is None and not _ragged(batch):
        lengths = [length for _, _, length in _rows_in(batch)]
        most, times = Counter(lengths).most_common(1)[0] if lengths else (0, 0)
        count = most if 2 * times > len(lengths) else None
    return count


def _sequence_lengths(item: Any) -> set[int]:
    if not _is_container(item):
        return set()
    own = {len(cast("list[Any]", item))} if _is_sequence(item) else set[int]()
    return own.union(*(_sequence_lengths(part) for _, part in _named_parts(item, "")))


def _ragged(item: Any) -> bool:
    if not _is_container(item):
        return False
    parts = [part for _, part in _named_parts(item, "")]
    if _is_sequence(item) and all(isinstance(one, Tensor) for one in parts) and _alike(parts):
        return len({tuple(one.shape[1:]) for one in parts}) > 1 and (len(parts) > 2 or parts[0].ndim > 2)
    return any(map(_ragged, parts))


def _alike(parts: list[Any]) -> bool:
    return len({(one.dtype, one.ndim) for one in parts}) == 1


def _is_sequence(item: Any) -> bool:
    return isinstance(item, tuple | list) and not hasattr(item, "_fields") and not isinstance(item, torch.Size)


def _is_samples(item: Any, count: int) -> bool:
    return _is_sequence(item) and len(item) == count and {length for _, _, length in _rows_in(item)} != {count}


def _obstacle(item: Any, count: int, path: str, in_columns: bool) -> str:
    name = f"`{path}`" if path else "it"
    if (length := _rows(item)) is not None:
        if length == count or count not in item.shape:  # or a table that all samples share
            return ""
        return f"{name} {list(item.shape)} has the {count} samples in dim {list(item.shape).index(count)}"
    if _is_samples(item, count):
        numbers = isinstance(item, tuple) and all(isinstance(one, int | float) for one in cast("Any", item))
        return f"{name} may be {count} samples or one value of all" if numbers and count < 4 else ""
    if _is_container(item):
        parts = _named_parts(item, path)
        tensors = all(isinstance(one, Tensor) for _, one in parts)
        if _is_sequence(item) and len(parts) == count and not in_columns and tensors and _alike([p for _, p in parts]):
            return f"{name} is a {type(item).__name__} of {count}, which may be the samples or their columns"
        return next(filter(None, (_obstacle(part, count, place, in_columns) for place, part in parts)), "")
    opaque = hasattr(item, "to") or isinstance(item, Sized) or any(_arrays_in(item, ""))
    if item is None or isinstance(item, (*_PLAIN, np.generic)) or getattr(item, "ndim", 1) == 0 or not opaque:
        return ""
    return f"{name} is a {type(item).__name__}, which only you know how to cut"


def _is_container(item: Any) -> bool:
    if isinstance(item, Mapping | tuple | list):
        return not isinstance(item, torch.Size | PackedSequence)
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _named_parts(item: Any, path: str) -> list[tuple[str, Any]]:
    dot = f"{path}." if path else ""
    if isinstance(item, Mapping):
        return [(f"{dot}{name}", part) for name, part in cast("Mapping[Any, Any]", item).items()]
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return [(f"{dot}{name}", getattr(item, name)) for name in cast("Any", item)._fields]
    if isinstance(item, tuple | list):
        return [(f"{path}[{number}]", part) for number, part in enumerate(cast("list[Any]", item))]
    return [(f"{dot}{field.name}", getattr(item, field.name)) for field in dataclasses.fields(item)]
