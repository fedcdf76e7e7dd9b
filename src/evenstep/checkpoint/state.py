"""A nested state as named tensors and a JSON skeleton, and back.

The skeleton holds everything that is not a tensor and, where a tensor stood, its name; what JSON lacks (tuples, int
keys, inf and nan) is a one-key object whose key begins with `$`. Nothing is pickled: what has no exact form here is
refused by name when it is saved, not when it is needed.

It keeps values, not objects: an `OrderedDict` comes back as a dict, a parameter as a tensor without `requires_grad`.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias, cast

import torch
from torch import Tensor

from evenstep.checkpoint.damage import UnreadableError
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


def is_sharded(value: object) -> bool:
    """Whether `value` is a tensor cut over ranks: a `Shard`, a DTensor, or whatever else DCP can ask for its pieces."""
    return hasattr(type(value), "__create_write_items__")


def pack(tree: object, name: str, sharded: dict[str, object] | None = None) -> tuple[dict[str, Tensor], JSON]:
    """Split a tree of dict, list, tuple, Tensor, str, int, float, bool and None into tensors and a skeleton.

    A tensor is named by its path below `name`, joined with dots, so that a module's `state_dict()` keeps its names.
    Tensors that are the same memory in the same way (tied parameters) get one name; views that only overlap are
    each stored whole. No tensor is copied or moved here.

    Args:
        name: what to call the root in messages.
        sharded: takes the tensors that are cut over ranks, by name; None refuses them.

    Raises:
        CheckpointError: a value with no exact form, named by its path.

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
            return self._encode_sharded(self.sharded, node, path)
        if isinstance(node, Tensor):
            return self._encode_tensor(node, path)
        kind = type(node)
        if node is None or kind is bool or kind is str or kind is int:
            return cast("bool | str | int | None", node)
        if kind is float:
            number = cast(float, node)
            return number if math.isfinite(number) else {"$float": str(number)}
        if kind is list or kind is tuple:
            parts = cast("list[object] | tuple[object, ...]", node)
            encoded = [self.encode(part, (*path, str(index))) for index, part in enumerate(parts)]
            return encoded if kind is list else {"$tuple": encoded}
        if kind is dict or kind is OrderedDict:
            return self._encode_dict(cast("dict[object, object]", node), path)
        raise self._refuse(path, f"is a `{kind.__module__}.{kind.__qualname__}`", _advice(node))

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
        name = self._names.get(memory) if tensor.numel() else None
        if name is None:
            name = self._free_name(".".join(path) or "value")
            self._names[memory] = name
            self.tensors[name] = tensor if tensor.dtype in DTYPE_NAMES else _as_bytes(tensor)
        if tensor.dtype in DTYPE_NAMES:
            return {"$tensor": name}
        return {"$tensor": name, "dtype": str(tensor.dtype).removeprefix("torch.")}

    def _encode_sharded(self, sharded: dict[str, object], node: object, path: tuple[str, ...]) -> JSON:
        # by identity, not by memory: a rank that holds nothing of it must come to the same names
        name = self._names.get(("sharded", id(node)))
        if name is None:
            name = self._free_name(".".join(path) or "value")
            self._names["sharded", id(node)] = name
            sharded[name] = node
        return {"$tensor": name}

    def _free_name(self, wanted: str) -> str:
        # "__metadata__" is taken by the safetensors format itself
        name, count = wanted, 1
        while name in self.tensors or name in (self.sharded or ()) or name == "__metadata__":
            name, count = f"{wanted}~{count}", count + 1
        return name

    def _refuse(self, path: tuple[str, ...], what: str, advice: str) -> CheckpointError:
        place = ".".join((self.name, *(part for part in path if part)))  # a single task's name is ""
        return CheckpointError(
            f"`{place}` {what}, which cannot be saved; a state holds dict, list, tuple, Tensor, str, int, float, "
            f"bool and None: {advice}."
        )


def unpack(skeleton: JSON, tensors: Mapping[str, Tensor], name: str) -> object:
    """The tree that `pack` split.

    Args:
        skeleton, tensors: as `pack` gave them.
        name: what to call the root in messages.

    Raises:
        UnreadableError: for a number format that this torch lacks.

    >>> unpack({"$dict": [[3, {"$tuple": [1, {"$float": "inf"}]}]]}, {}, "model")
    {3: (1, inf)}
    """
    return _decode(skeleton, tensors, name)


def _decode(node: JSON, tensors: Mapping[str, Tensor], name: str) -> object:
    if isinstance(node, list):
        return [_decode(part, tensors, name) for part in node]
    if not isinstance(node, dict):
        return node
    match node:
        case {"$tuple": list(parts)}:
            return tuple(_decode(part, tensors, name) for part in parts)
        case {"$float": str(text)}:
            return _FLOATS[text]
        case {"$dict": list(pairs)}:
            return {key: _decode(value, tensors, name) for key, value in cast("list[tuple[str | int, JSON]]", pairs)}
        case {"$tensor": str(tensor_name), **rest}:
            tensor = tensors[tensor_name]
            return _from_bytes(tensor, rest["dtype"], name) if rest else tensor
        case _:
            return {key: _decode(value, tensors, name) for key, value in node.items()}


def _as_bytes(tensor: Tensor) -> Tensor:
    values = tensor.resolve_conj().resolve_neg().contiguous()
    flat = values.as_strided((values.numel(),), (1,))  # one element is contiguous at any stride
    return flat.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


def _from_bytes(stored: Tensor, dtype_name: JSON, name: str) -> Tensor:
    dtype: object = getattr(torch, str(dtype_name), None)
    if not isinstance(dtype, torch.dtype):
        raise UnreadableError(f"`{name}` holds a tensor of `{dtype_name}`, which torch {torch.__version__} lacks.")
    return stored.reshape(-1).view(dtype).reshape(stored.shape[:-1])


def _advice(node: object) -> str:
    if type(node).__module__ == "numpy":
        return "use `.item()` of a numpy scalar, `torch.from_numpy` of an array"
    for kind in (int, float, str, tuple, list, dict):
        if isinstance(node, kind):
            return f"convert it to a plain {kind.__name__}"
    return "save what it is made of"
