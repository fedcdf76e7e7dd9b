"""A nested state as named tensors and a JSON skeleton, and back.

The skeleton has names in the places of tensors. JSON lacks tuples, sets, deques, int keys, inf and nan: each is an
object of one key that begins with `$`. Nothing is pickled: a value without an exact form is refused when it is saved.
An `OrderedDict` or `defaultdict` comes back as a dict, a number of numpy as a plain one, a parameter as a tensor
without `requires_grad`.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from evenstep.checkpoint.folders import FILE_NAME
from evenstep.checkpoint.manifest import UnreadableError
from evenstep.errors import CheckpointError

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that a safetensors file names; tensors of other dtypes are stored as their bytes."""

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DICTS = (dict, OrderedDict, defaultdict)


def is_sharded(value: object) -> bool:
    """True for a tensor that is cut over ranks: a `Shard`, a DTensor, or another class that DCP asks for pieces."""
    return hasattr(type(value), "__create_write_items__")


class FlatState(NamedTuple):
    """A state as tensors and values.

    Args:
        whole: whole tensors, by part and by name in the part.
        sharded: tensors that are cut over ranks, by `PART/NAME`.
        values: skeletons by part.
    """

    whole: dict[str, dict[str, Tensor]]
    sharded: dict[str, Any]
    values: dict[str, JSON]

    def by_name(self) -> dict[str, Any]:
        """Every tensor by `PART/NAME`."""
        whole = {f"{part}/{name}": tensor for part, each in self.whole.items() for name, tensor in each.items()}
        return {**whole, **self.sharded}


def flat_state(state: Mapping[str, object], *, alone: bool) -> FlatState:
    """Take `state` apart, without a copy.

    Args:
        alone: True for the only process, which must hold all of a tensor that may be cut over ranks.
    """
    flat = FlatState({}, {}, {})
    for part, tree in state.items():
        if not FILE_NAME.fullmatch(part):
            raise CheckpointError(
                f"{part!r} cannot be a top-level key of a state, as it names a file; use letters, digits, `_` and `-`.",
                field=part,
            )
        cut: dict[str, Any] = {}
        flat.whole[part], flat.values[part] = pack(tree, part, cut)
        for name, leaf in cut.items():
            local = local_of(leaf)
            if local.dtype not in DTYPE_NAMES or (alone and local.shape != leaf.size()):
                raise CheckpointError(
                    f"`{part}.{name}` is cut over ranks; save it by all ranks, and in a dtype of safetensors files "
                    f"instead of {local.dtype}.",
                    field=f"{part}.{name}",
                )
            if alone:
                flat.whole[part][name] = local
            else:
                flat.sharded[f"{part}/{name}"] = leaf
    return flat


def local_of(leaf: Any) -> Tensor:
    """This rank's block of a sharded tensor."""
    return cast("Tensor", leaf.__get_tensor_shard__(None)).detach()


def pack(tree: object, name: str, sharded: dict[str, object] | None = None) -> tuple[dict[str, Tensor], JSON]:
    """Split a tree into tensors and a skeleton of dict, list, tuple, set, deque, Counter, str, numbers and None.

    A tensor is named by its path below `name`, joined with dots, so that a module's `state_dict()` keeps its names.
    Tied tensors (of the same memory, shape and strides) get one name; views that only overlap are stored whole each.
    No tensor is copied or moved.

    Args:
        name: of the root, in errors.
        sharded: takes the tensors that are cut over ranks, by name; None refuses them.

    Raises:
        CheckpointError: a value with no exact form; its path is the error's field.

    >>> tensors, skeleton = pack({"bias": torch.zeros(2), 3: (1, float("inf"))}, "model")
    >>> list(tensors), skeleton
    (['bias'], {'$dict': [['bias', {'$tensor': 'bias'}], [3, {'$tuple': [1, {'$float': 'inf'}]}]]})
    """
    packer = _Packer(name, sharded)
    skeleton = packer.encode(tree, ())
    return packer.tensors, skeleton


class _Packer:
    def __init__(self, name: str, sharded: dict[str, object] | None) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.sharded = sharded
        self._names: dict[tuple[object, ...], str] = {}

    def encode(self, node: object, path: tuple[str, ...]) -> JSON:
        if self.sharded is not None and is_sharded(node):
            # ties are found by identity, so a rank without elements of the tensor gets the same names
            return {"$tensor": self._name_of(("sharded", id(node)), node, self.sharded, path)}
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
        if kind is tuple:
            return {"$tuple": self._encode_each(live, path)}
        if kind is deque:
            return {"$deque": [live.maxlen, self._encode_each(live, path)]}
        if kind in (set, frozenset):
            return {f"${kind.__name__}": self._encode_each(sorted(live, key=repr), path)}
        if kind is Counter:
            return {"$counter": self._encode_dict(live, path)}
        if kind in _DICTS:
            return self._encode_dict(live, path)
        raise self._refuse(path, f"is a `{kind.__module__}.{kind.__qualname__}`", "save plain values of it")

    def _encode_each(self, nodes: Any, path: tuple[str, ...]) -> list[JSON]:
        return [self.encode(node, (*path, str(index))) for index, node in enumerate(nodes)]

    def _encode_dict(self, node: dict[object, object], path: tuple[str, ...]) -> JSON:
        pairs: list[tuple[str | int, JSON]] = []
        for key, value in node.items():
            if type(key) is not str and type(key) is not int:
                raise self._refuse(path, f"has the key {key!r} of type `{type(key).__name__}`", "use str or int keys")
            pairs.append((key, self.encode(value, (*path, str(key)))))
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return {str(key): value for key, value in pairs}
        return {"$dict": [[key, value] for key, value in pairs]}

    def _encode_tensor(self, node: Tensor, path: tuple[str, ...]) -> JSON:
        tensor = node.detach()
        if type(tensor) is not Tensor:
            raise self._refuse(path, f"is a `{type(tensor).__qualname__}`", "gather it into a plain tensor first")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise self._refuse(path, f"is a tensor without plain values ({kind})", "save its dense values")
        views = tensor.is_conj(), tensor.is_neg()
        memory = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride(), views)
        key = memory if tensor.numel() else ("empty", len(self.tensors), path)
        is_known = tensor.dtype in DTYPE_NAMES
        name = self._name_of(key, tensor if is_known else _as_bytes(tensor), self.tensors, path)
        return {"$tensor": name} if is_known else {"$tensor": name, "dtype": str(tensor.dtype).removeprefix("torch.")}

    def _name_of(self, key: tuple[object, ...], tensor: Any, tensors: dict[str, Any], path: tuple[str, ...]) -> str:
        name = self._names.get(key)
        if name is None:
            name = self._free_name(".".join(path) or "value")
            self._names[key] = name
            tensors[name] = tensor
        return name

    def _free_name(self, wanted: str) -> str:
        # "__metadata__" is taken by the safetensors format
        name, count = wanted, 1
        while name in self.tensors or name in (self.sharded or ()) or name == "__metadata__":
            name = f"{wanted}~{count}"
            count += 1
        return name

    def _refuse(self, path: tuple[str, ...], what: str, advice: str) -> CheckpointError:
        place = ".".join((self.name, *(part for part in path if part)))  # a single task's name is ""
        return CheckpointError(f"`{place}` {what}, which cannot be saved; {advice}.", field=place)


def unpack(skeleton: JSON, tensors: Mapping[str, Tensor], name: str) -> object:
    """The tree that `pack` split.

    Args:
        skeleton, tensors: as `pack` gave them.
        name: of the root, in errors.

    Raises:
        UnreadableError: a dtype that this torch lacks.

    >>> unpack({"$dict": [[3, {"$tuple": [1, {"$float": "inf"}]}]]}, {}, "model")
    {3: (1, inf)}
    """
    if isinstance(skeleton, list):
        return [unpack(part, tensors, name) for part in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    match skeleton:
        case {"$tuple": parts}:
            return tuple(cast("list[object]", unpack(parts, tensors, name)))
        case {"$set": parts}:
            return set(cast("list[object]", unpack(parts, tensors, name)))
        case {"$frozenset": parts}:
            return frozenset(cast("list[object]", unpack(parts, tensors, name)))
        case {"$deque": [maxlen, parts]}:
            return deque(cast("list[object]", unpack(parts, tensors, name)), cast("int | None", maxlen))
        case {"$counter": counts}:
            return Counter(cast("dict[object, int]", unpack(counts, tensors, name)))
        case {"$float": str(text)}:
            return _FLOATS[text]
        case {"$dict": list(pairs)}:
            return {key: unpack(part, tensors, name) for key, part in cast("list[tuple[str | int, JSON]]", pairs)}
        case {"$tensor": str(tensor_name), **rest}:
            tensor = tensors[tensor_name]
            return _from_bytes(tensor, rest["dtype"], name) if rest else tensor
        case _:
            return {key: unpack(part, tensors, name) for key, part in skeleton.items()}


def _as_bytes(tensor: Tensor) -> Tensor:
    values = tensor.resolve_conj().resolve_neg().contiguous()
    flat = values.as_strided((values.numel(),), (1,))  # one element is contiguous at any stride
    return flat.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


def _from_bytes(stored: Tensor, dtype_name: JSON, name: str) -> Tensor:
    dtype: object = getattr(torch, str(dtype_name), None)
    if not isinstance(dtype, torch.dtype):
        raise UnreadableError(f"`{name}` holds a tensor of `{dtype_name}`, which torch {torch.__version__} lacks.")
    return stored.reshape(-1).view(dtype).reshape(stored.shape[:-1])
