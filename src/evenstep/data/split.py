"""Finds the samples of a batch: how many it holds, and how it is cut in two between them, whatever it is made of.

Samples are rows of tensors and arrays, items of lists, sequences of a `PackedSequence` or of a nested tensor. How many
they are is known by who made the batch, or else by its tensors, where all of them agree. What can be read in two ways,
or not at all, is not cut: a task whose batches are made otherwise (features first, graphs) says how in `Task.split`.
It does not know what a batch means.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from inspect import isroutine
from pathlib import PurePath
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from evenstep.arguments import first_of, format_name
from evenstep.internals import times_written
from evenstep.strides import is_dense

_PLAIN = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    Enum,
    PurePath,
    torch.Size,
    torch.dtype,
    torch.device,
    slice,
    np.generic,
)


def num_samples(batch: Any, known: int | None = None) -> int | None:
    """How many samples `batch` holds; None where that is not certain.

    Args:
        known: how many were put in, where that is known: it is taken unless all tensors say something else.

    >>> import torch
    >>> num_samples({"name": ["a", "b"], "x": (torch.tensor(1.0), torch.zeros(2, 5))})
    2
    >>> features_first = {"x": torch.zeros(6, 8), "y": torch.zeros(8)}
    >>> num_samples(features_first), num_samples(features_first, known=8), num_samples(torch.zeros(6, 8), known=8)
    (None, 8, None)
    """
    if known is not None and type(batch) in (tuple, list) and _all_rows(batch, known):
        return known  # the commonest, at no cost
    lengths = {length for _, _, length in lengths_in(batch)}
    if known is None:
        return lengths.pop() if len(lengths) == 1 and not _ragged(batch) else None
    return known if not lengths or known in lengths or known in _sequence_lengths(batch) else None


def samples_in(parts: Sequence[Any], whole: Any, count: int) -> list[int | None]:
    """How many samples parts of a batch of `count` hold: what has so many rows there, and in all parts together, tells.

    Of edges `[2, edges]` of two graphs that is not so, though there are two rows of them.

    >>> import torch
    >>> batch = lambda n: {"x": torch.zeros(6, n), "y": torch.zeros(n)}
    >>> samples_in([batch(3), batch(5)], batch(8), 8), samples_in([torch.zeros(6, 3)], torch.zeros(6, 8), 8)
    ([3, 5], [None])
    """
    places = [path for path, length in _evidence(whole, "") if length == count]
    lengths = [dict(_evidence(part, "")) for part in parts]
    found = {tuple(one.get(path, -1) for one in lengths) for path in places}
    found = {told for told in found if -1 not in told and sum(told) == count}
    return list(found.pop()) if len(found) == 1 else [None] * len(parts)


def contents(batch: Any, *, formats: bool = False) -> str:
    """What the tensors of `batch` are, for messages.

    Args:
        formats: whether to say in which number formats as well.

    >>> import torch
    >>> contents({"x": torch.zeros(6, 8), "y": torch.zeros(8)})
    '`x` [6, 8], `y` [8]'
    >>> contents(torch.zeros(2, 3), formats=True)
    'float32 [2, 3]'
    >>> contents((torch.zeros(4, 1, 8), torch.zeros(4, 1, 9)))
    '`[0]` [4, 1, 8], `[1]` [4, 1, 9] (columns of 4 samples, or 2 samples of unequal shapes?)'
    """
    found = [f"`{path}` {_shape(one, formats)}" if path else _shape(one, formats) for path, one, _ in lengths_in(batch)]
    if not found:
        return f"a {type(batch).__name__} " + ("that holds tensors" if _numbers_in(batch) else "without tensors")
    lengths = {length for _, _, length in lengths_in(batch)}
    if len(lengths) > 1 or not _ragged(batch):
        return first_of(found, 4)
    unsure = f" (columns of {lengths.pop()} samples, or {len(found)} samples of unequal shapes?)"
    return first_of(found, 4) + unsure


def num_elements(batch: Any) -> int:
    """How many numbers the tensors of `batch` hold: what its memory grows with, also where lengths differ.

    >>> import torch
    >>> num_elements([torch.zeros(2, 5), torch.zeros(2)])
    12
    """
    return sum(leaf.size if isinstance(leaf, np.ndarray) else leaf.numel() for leaf in _numbers_in(batch))


def tensors_in(item: Any) -> list[Tensor]:
    """The tensors of a pytree, in order."""
    return [leaf for leaf in _numbers_in(item) if isinstance(leaf, Tensor)]


def halves(batch: Any, known: int | None = None) -> list[Any]:
    """`batch` as two batches, the first of which is not the smaller one; or as itself, where it can't be cut.

    Args:
        known: how many samples were put in, where that is known.

    >>> import torch
    >>> halves((torch.arange(3), ["a", "b", "c"]))
    [(tensor([0, 1]), ['a', 'b']), (tensor([2]), ['c'])]
    >>> len(halves(torch.zeros(1, 7)))
    1
    """
    count = cuttable_samples(batch, known)
    if count < 2:
        return [batch]
    middle = half_of_samples(count)
    return [samples_of(batch, 0, middle, count), samples_of(batch, middle, count, count)]


def cuttable_samples(batch: Any, known: int | None = None, *, in_columns: bool = False) -> int:
    """In how many samples `batch` can be cut; 1 where it can't be.

    Args:
        in_columns: whether lists in it are known to be columns, and not samples.

    >>> import torch
    >>> two = [torch.zeros(2, 4), torch.zeros(2, 1)]
    >>> cuttable_samples(two, 2), cuttable_samples(two, 2, in_columns=True)
    (1, 2)
    """
    count = _count(batch, known)
    return 1 if count is None or _obstacle(batch, count, "", in_columns) else max(count, 1)


def half_of_samples(count: int) -> int:
    """How many samples of `count` the first half has."""
    return (count + 1) // 2


def samples_of(batch: Any, first: int, end: int, count: int) -> Any:
    """Samples `first` to `end` of a batch that can be cut in `count`."""
    return _part(batch, slice(first, end), count)


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
    """The same batch with tensors and containers of its own: whatever is done to it in place is not done to `item`.

    >>> import torch
    >>> batch = {"x": torch.zeros(2), "names": ["a", "b"]}
    >>> twin = copied(batch); twin["x"] += 1; _ = twin.pop("names"); batch
    {'x': tensor([0., 0.]), 'names': ['a', 'b']}
    """
    if isinstance(item, Tensor):
        return item.detach().clone()
    if _is_container(item):
        return rebuilt(item, copied)
    return item if item is None or isinstance(item, _PLAIN) else _copied_object(item)


def _copied_object(item: Any) -> Any:
    try:
        return copy.deepcopy(item)
    except Exception:  # noqa: BLE001 - it holds what has no copy, such as a lock or an open file, which is then shared
        pass
    try:
        made = copy.copy(item)
        for name, value in vars(made).items():
            vars(made)[name] = copied(value)
    except Exception:  # noqa: BLE001 - it is such a thing itself
        return item
    return made


def marks(item: Any) -> list[Any]:
    """What is another when something was written into a batch: into its tensors, containers, arrays or objects.

    >>> import torch
    >>> batch = {"x": torch.zeros(2), "names": ["a", "b"]}; before = marks(batch)
    >>> marks(batch) == before, batch["x"].add_(1)[0].item(), marks(batch) == before
    (True, 1.0, False)
    """
    return [(path, id(part), _written(part)) for path, part in _parts(item, "", set())]


def written(before: Sequence[tuple[Any, ...]], batch: Any) -> list[str]:
    """The paths of the tensors and arrays of `batch` that were written into since, or that others stand in place of.

    >>> import torch
    >>> batch = {"x": torch.zeros(2), "y": torch.zeros(2)}; before = marks(batch)
    >>> batch["y"] += 1; batch["mask"] = batch["x"] > 0; written(before, batch)
    ['y']
    """
    now = {path: mark for path, *mark in marks(batch)}
    return [path for path, *mark in before if mark[1] != "" and now.get(path, mark) != mark]


def checksums(item: Any) -> dict[str, int]:
    """A number for the bits of each tensor and array of a batch, by its path, also on a device.

    >>> import torch
    >>> one, other = {"x": torch.zeros(2), "y": np.ones(3)}, {"x": torch.zeros(2, 3)[:, 0], "y": np.ones((3, 1))}
    >>> [path for path, bits in checksums(one).items() if checksums(other)[path] != bits]
    ['y']
    """
    found: dict[str, int] = {}
    for path, part in _parts(item, "", set()):
        array = part
        if isinstance(part, Tensor) and is_dense(part):
            packed = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
            array = packed.as_strided((packed.numel(),), (1,)).view(torch.uint8).numpy()
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            found[path] = crc32(np.ascontiguousarray(array).data, crc32(repr((part.shape, part.dtype)).encode()))
    return found


def _parts(item: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """A batch and all that is in it, with paths; what is in a tensor, an array or a module is not looked at."""
    yield path, item
    whole = (Tensor, np.ndarray, *_PLAIN, type, torch.nn.Module)
    if id(item) in seen or item is None or isinstance(item, whole):
        return
    seen.add(id(item))
    own = [] if isroutine(item) else [*getattr(item, "__dict__", {}).items()]
    for name, part in _named_parts(item, path) if _is_container(item) else own:
        yield from _parts(part, name, seen)


def _written(part: Any) -> Any:
    """What is another when a tensor or an array was written into; "" for all else."""
    if isinstance(part, Tensor):
        return 0 if part.is_inference() else times_written(part)
    return part.tobytes() if isinstance(part, np.ndarray) else ""


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


def lengths_in(item: Any, path: str = "") -> Iterator[tuple[str, Any, int]]:
    """Path, value and number of rows of all that has rows in a batch."""
    length = _rows(item)
    if length is not None:
        yield path, item, length
    elif _is_container(item) and not isinstance(item, PackedSequence):
        for name, part in _named_parts(item, path):
            yield from lengths_in(part, name)


def _all_rows(items: list[Any], count: int) -> bool:
    """Whether all items are plain tensors of so many rows."""
    return all(type(one) is Tensor and not one.is_nested and one.ndim and one.shape[0] == count for one in items)


def _rows(item: Any) -> int | None:
    """How many rows a leaf has; None for what has none."""
    if isinstance(item, Tensor):
        return item.size(0) if item.ndim else None
    if isinstance(item, np.ndarray):
        return item.shape[0] if item.ndim else None
    return int(item.batch_sizes[0]) if isinstance(item, PackedSequence) else None


def _shape(item: Any, formats: bool = False) -> str:
    if isinstance(item, PackedSequence):
        return f"of {_rows(item)} packed sequences"
    if isinstance(item, Tensor) and item.is_nested:
        return f"of {item.size(0)} nested tensors"
    return f"{format_name(item.dtype)} {list(item.shape)}" if formats else str(list(item.shape))


def _count(batch: Any, known: int | None) -> int | None:
    """How many samples a batch is cut by: also where most of its tensors say it, and the others none."""
    count = num_samples(batch, known)
    if count is None and known is None and not _ragged(batch):
        lengths = [length for _, _, length in lengths_in(batch)]
        most, times = Counter(lengths).most_common(1)[0] if lengths else (0, 0)
        count = most if 2 * times > len(lengths) else None
    return count


def _sequence_lengths(item: Any) -> set[int]:
    """The lengths of all lists and tuples in a batch."""
    if not _is_container(item) or isinstance(item, PackedSequence):
        return set()
    own = {len(cast("list[Any]", item))} if _is_sequence(item) else set[int]()
    return own.union(*(_sequence_lengths(part) for _, part in _named_parts(item, "")))


def _evidence(item: Any, path: str) -> Iterator[tuple[str, int]]:
    """The lengths of all that has some, with their paths: tensors, sequences, tensors of objects."""
    length = len(item) if _is_sequence(item) and not isinstance(item, PackedSequence) else _rows(item)
    if length is not None:
        yield path, length
    parts = _named_parts(item, path) if _is_container(item) else []
    if not parts and not isinstance(item, (*_PLAIN, Tensor, np.ndarray, PackedSequence)):
        parts = [(f"{path}.{name}", one) for name, one in getattr(item, "__dict__", {}).items()]
        parts = [(name, one) for name, one in parts if _rows(one) is not None]
    for name, part in parts:
        yield from _evidence(part, name)


def _ragged(item: Any) -> bool:
    """Whether a batch holds what looks like a list of samples of unequal shapes."""
    if not _is_container(item) or isinstance(item, PackedSequence):
        return False
    parts = [part for _, part in _named_parts(item, "")]
    if _is_sequence(item) and len(parts) > 1 and isinstance(parts[0], Tensor) and _alike(parts):
        tensors = cast("list[Tensor]", parts)
        shapes = {tuple(one.shape[1:]) for one in tensors if not one.is_nested}
        return len(shapes) > 1 and (len(tensors) > 2 or tensors[0].ndim > 2)
    return any(_ragged(part) for part in parts)


def _alike(parts: list[Any]) -> bool:
    """Whether all are tensors of one format and as many dims, or are made of such tensors in one way."""
    return len({_signature(part) for part in parts}) == 1


def _signature(item: Any) -> tuple[Any, ...]:
    if isinstance(item, Tensor | np.ndarray):
        return item.dtype, item.ndim
    parts = _named_parts(item, "") if _is_container(item) else []
    return type(item), *((name, _signature(part)) for name, part in parts)


def _is_sequence(item: Any) -> bool:
    return isinstance(item, tuple | list) and not hasattr(item, "_fields") and not isinstance(item, torch.Size)


def _is_samples(item: Any, count: int) -> bool:
    """Whether a sequence is one of samples, and not of columns."""
    if not _is_sequence(item) or len(item) != count:
        return False
    lengths = {length for _, _, length in lengths_in(item)}
    return lengths != {count}


def _obstacle(item: Any, count: int, path: str, in_columns: bool) -> str:
    """What keeps a batch from being cut in samples, as a sentence; "" if nothing does."""
    name = f"`{path}`" if path else "it"
    length = _rows(item)
    if length is not None:
        if length == count:
            known = not isinstance(item, Tensor) or item.layout in (torch.strided, torch.jagged, torch.sparse_coo)
            return "" if known else f"{name} is in the layout {item.layout}, which can't be cut"
        where = None if isinstance(item, PackedSequence) or getattr(item, "is_nested", False) else list(item.shape)
        if where is not None and count not in where:
            return ""  # a table that all samples share
        if where is None:
            return f"{name} is {_shape(item)}, but there are {count} samples"
        return f"{name} {_shape(item)} has the {count} samples in dim {where.index(count)}"
    if _is_samples(item, count):
        numbers = isinstance(item, tuple) and all(isinstance(part, int | float) for part in cast("Any", item))
        return f"{name} may be {count} samples or one value of all" if numbers and count < 4 else ""
    if _is_sequence(item) and len(item) == count and not in_columns and _alike(list(item)):
        return f"{name} is a {type(item).__name__} of {count}, which may be the samples or their columns"
    if _is_container(item):
        parts = _named_parts(item, path)
        return next(filter(None, (_obstacle(part, count, place, in_columns) for place, part in parts)), "")
    if item is None or isinstance(item, (*_PLAIN, Tensor, np.ndarray)):
        return ""
    opaque = hasattr(item, "to") or isinstance(item, Sized) or bool(_numbers_in(item))
    return f"{name} is a {type(item).__name__}, which only you know how to cut" if opaque else ""


def _part(item: Any, part: slice, count: int) -> Any:
    """The samples of `part`; there is no obstacle."""
    if _rows(item) == count:
        return _part_of_rows(item, part)
    if _is_samples(item, count):
        return item[part]
    if _rows(item) is None and _is_container(item):
        return rebuilt(item, lambda one: _part(one, part, count))
    return item


def _part_of_rows(item: Any, part: slice) -> Any:
    if isinstance(item, PackedSequence):
        padded, lengths = pad_packed_sequence(item, batch_first=True)
        lengths = lengths[part]
        rows = padded[part, : int(lengths.max())]
        return pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=item.sorted_indices is None)
    if isinstance(item, Tensor) and item.is_nested:
        return torch.nested.as_nested_tensor(list(item.unbind()[part]), layout=item.layout)
    if isinstance(item, Tensor) and item.layout == torch.sparse_coo:
        return item.index_select(0, torch.arange(part.start, part.stop, device=item.device))
    return item[part]


def _numbers_in(item: Any) -> list[Any]:
    """The tensors and arrays of a batch, also those that are attributes of its objects."""
    if isinstance(item, Tensor | np.ndarray):
        return [item]
    if _is_container(item):
        return [leaf for _, part in _named_parts(item, "") for leaf in _numbers_in(part)]
    if item is None or isinstance(item, (*_PLAIN, type)) or callable(item):
        return []
    attributes = cast("dict[str, Any]", getattr(item, "__dict__", {}))
    return [one for one in attributes.values() if isinstance(one, Tensor | np.ndarray)]


def _is_container(item: Any) -> bool:
    if isinstance(item, Mapping | tuple | list):
        return not isinstance(item, torch.Size)
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _named_parts(item: Any, path: str) -> list[tuple[str, Any]]:
    """The parts of a container, with their paths."""
    dot = f"{path}." if path else ""
    if isinstance(item, Mapping):
        return [(f"{dot}{name}", part) for name, part in cast("Mapping[Any, Any]", item).items()]
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return [(f"{dot}{name}", getattr(item, name)) for name in cast("Any", item)._fields]
    if isinstance(item, tuple | list):
        return [(f"{path}[{number}]", part) for number, part in enumerate(cast("list[Any]", item))]
    return [(f"{dot}{field.name}", getattr(item, field.name)) for field in dataclasses.fields(item)]
