"""A nested state as named tensors and a JSON skeleton, and back. Nothing is pickled.

JSON lacks tensors, tuples, sets, int keys, inf and nan: each is an object of one key that begins with `$`.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from evenstep.checkpoint.folders import FILE_NAME
from evenstep.checkpoint.shard import is_sharded, local_of
from evenstep.checkpoint.tensor_file import DTYPE_NAMES
from evenstep.errors import CheckpointError

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

_DICTS = (dict, OrderedDict, defaultdict)
_KINDS: Mapping[str, Callable[[Any], object]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$counter": Counter,
    "$deque": lambda parts: deque(parts[1], parts[0]),
    "$float": float,
    "$dict": dict,
}


def flat_state(state: Mapping[str, object], *, alone: bool) -> tuple[dict[str, Any], dict[str, JSON]]:
    """Tensors of `state` by `PART/NAME`, whole or cut over ranks, and skeletons by part; nothing is copied.

    Args:
        alone: True for the only process, which must hold the whole of each tensor.
    """
    found: dict[str, Any] = {}
    values: dict[str, JSON] = {}
    for part, tree in state.items():
        if not FILE_NAME.fullmatch(part):
            raise CheckpointError(
                f"the key {part!r} of a state names a file; use letters, digits, `_` and `-`.", field=part
            )
        tensors, values[part] = pack(tree, part)
        for name, leaf in tensors.items():
            if is_sharded(leaf):
                local = local_of(leaf)
                if local.dtype not in DTYPE_NAMES or (alone and local.shape != leaf.shape):
                    raise CheckpointError(
                        f"`{part}.{name}` ({local.dtype}) is cut over ranks; save it by all ranks, in a dtype of "
                        f"safetensors files.",
                        field=f"{part}.{name}",
                    )
                leaf = local if alone else leaf
            found[f"{part}/{name}"] = leaf
    return found, values


def pack(tree: object, name: str) -> tuple[dict[str, Any], JSON]:
    """Split a tree into tensors, whole or cut over ranks, by path, and a JSON skeleton; tied tensors get one name.

    Args:
        name: of the root, in errors.

    >>> pack({"bias": torch.zeros(2), 3: (1, float("inf"))}, "model")[1]
    {'$dict': [['bias', {'$tensor': 'bias'}], [3, {'$tuple': [1, {'$float': 'inf'}]}]]}
    """
    packer = _Packer(name)
    skeleton = packer.encode(tree, ())
    return packer.tensors, skeleton


class _Packer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Any] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def encode(self, node: object, path: tuple[str, ...]) -> JSON:
        if is_sharded(node):
            # ties are found by identity, so a rank without elements of the tensor gets the same names
            return self._encode_leaf(("sharded", id(node)), node, path)
        if isinstance(node, Tensor):
            return self._encode_tensor(node, path)
        if isinstance(node, np.generic):
            node = node.item()  # stays as it is if Python has no such number
        kind: Any = type(node)
        live: Any = node
        if node is None or kind in (bool, str, int):
            return live
        if kind is float:
            return live if math.isfinite(live) else {"$float": str(live)}
        if kind is list:
            return self._encode_each(live, path)
        if kind in (tuple, set, frozenset):
            return {f"${kind.__name__}": self._encode_each(live if kind is tuple else sorted(live, key=repr), path)}
        if kind is deque:
            return {"$deque": [live.maxlen, self._encode_each(live, path)]}
        if kind is Counter:
            return {"$counter": self._encode_dict(live, path)}
        if kind in _DICTS:
            return self._encode_dict(live, path)
        raise self._refusal(path, f"is a `{kind.__module__}.{kind.__qualname__}`", "save plain values of it")

    def _encode_each(self, nodes: Any, path: tuple[str, ...]) -> list[JSON]:
        return [self.encode(node, (*path, str(index))) for index, node in enumerate(nodes)]

    def _encode_dict(self, node: dict[object, object], path: tuple[str, ...]) -> JSON:
        pairs: list[tuple[str | int, JSON]] = []
        for key, value in node.items():
            if type(key) is not str and type(key) is not int:
                raise self._refusal(path, f"has the key {key!r} of type `{type(key).__name__}`", "use str or int keys")
            pairs.append((key, self.encode(value, (*path, str(key)))))
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return {str(key): value for key, value in pairs}
        return {"$dict": [[key, value] for key, value in pairs]}

    def _encode_tensor(self, node: Tensor, path: tuple[str, ...]) -> JSON:
        tensor = node.detach()
        has_values = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
        if type(tensor) is not Tensor or not has_values or tensor.dtype not in DTYPE_NAMES:
            what = f"is a `{type(tensor).__qualname__}` ({tensor.dtype}, {tensor.layout}, {tensor.device})"
            raise self._refusal(path, what, "save plain dense values of it")
        views = tensor.is_conj(), tensor.is_neg()
        memory = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride(), views)
        key = memory if tensor.numel() else ("empty", len(self.tensors), path)
        return self._encode_leaf(key, tensor, path)

    def _encode_leaf(self, key: tuple[object, ...], leaf: Any, path: tuple[str, ...]) -> JSON:
        if key not in self._names:
            wanted = ".".join(path) or "value"
            others = (f"{wanted}~{number}" for number in count(1))
            # "__metadata__" is taken by the safetensors format
            name = next(one for one in chain([wanted], others) if one not in self.tensors and one != "__metadata__")
            self._names[key] = name
            self.tensors[name] = leaf
        return {"$tensor": self._names[key]}

    def _refusal(self, path: tuple[str, ...], what: str, advice: str) -> CheckpointError:
        place = ".".join((self.name, *(part for part in path if part)))  # a single task's name is ""
        return CheckpointError(f"`{place}` {what}, which cannot be saved; {advice}.", field=place)


def unpack(skeleton: JSON, tensors: Mapping[str, Tensor]) -> object:
    """The tree that `pack` split.

    >>> unpack({"$dict": [[3, {"$tuple": [1, {"$float": "inf"}]}]]}, {})
    {3: (1, inf)}
    """
    if isinstance(skeleton, list):
        return [unpack(part, tensors) for part in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    word, content = next(iter(skeleton.items()), ("", None))
    if word == "$tensor":
        return tensors[cast("str", content)]
    if word in _KINDS:
        return _KINDS[word](unpack(content, tensors))
    return {key: unpack(part, tensors) for key, part in skeleton.items()}
