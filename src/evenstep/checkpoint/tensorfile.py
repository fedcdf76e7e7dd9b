"""The safetensors format, written and read tensor by tensor with the checksum taken on the way.

A file is the length of a JSON header, the header (name → dtype, shape, range of bytes), then all values without
gaps, so `safetensors.torch.load_file` reads what is written here. The library itself is not used, because it can
neither sync nor report a checksum of what it writes, nor check one while it reads without another copy; each tensor
is read into memory of its own, aligned as a fresh one is, so that a resumed run computes the same bits.
Reference: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from evenstep.checkpoint.state import DTYPE_NAMES

CHUNK_BYTES = 4 << 20
IMAGE_CHUNK_BYTES = 32 << 20
_ALIGNMENT_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000
_MAX_NUMEL = 2**59
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class BadFileError(Exception):
    """What is wrong with a file, to be told together with its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor in a file: its bytes are those from `begin` to `end` after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Source(Protocol):
    """A file from which exactly the asked bytes come, or BadFileError."""

    size: int

    def read(self, num_bytes: int) -> bytes: ...
    def read_into(self, buffer: memoryview) -> None: ...


class TensorFile:
    """The bytes of a safetensors file of these tensors: how many, and, in order, which.

    They come from the tensors themselves or, if they may change before, from an image of the file in memory.

    Args:
        tensors: name → tensor, on any device, of a dtype in `DTYPE_NAMES`, with any strides.

    >>> file = TensorFile({"bias": torch.zeros(2)})
    >>> file.size, b"".join(file.chunks())[8:40]
    (136, b'{"__metadata__":{"format":"pt"},')
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # the widest first: every tensor then begins at a multiple of its element size, most at one of a cache line
        order = sorted(tensors, key=lambda name: _place(tensors[name]))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in order:
            tensor = tensors[name]
            begin, end = end, end + tensor.numel() * tensor.element_size()
            entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            entries[name] = entry
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % _ALIGNMENT_BYTES)
        self.head = len(header).to_bytes(8, "little") + header
        self.tensors = [tensors[name] for name in order]
        self.size = len(self.head) + end
        self._entries = entries
        self._image: Tensor | None = None

    def cut(self, image: Tensor) -> list[Tensor]:
        """What `tensors` are in an image of the file, uint8 of its size; writes the header into it.

        >>> file = TensorFile({"bias": torch.ones(2)})
        >>> image = torch.zeros(file.size, dtype=torch.uint8)
        >>> file.cut(image)[0].copy_(file.tensors[0])
        tensor([1., 1.])
        >>> bytes(image.numpy()) == b"".join(file.chunks())
        True
        """
        image[: len(self.head)] = torch.frombuffer(bytearray(self.head), dtype=torch.uint8)
        begin, views = len(self.head), list[Tensor]()
        for tensor in self.tensors:
            end = begin + tensor.numel() * tensor.element_size()
            views.append(image[begin:end].view(tensor.dtype).view(tensor.shape))
            begin = end
        return views

    def take_from(self, image: Tensor) -> None:
        """From now on, give the bytes of this image, and let go of the tensors."""
        self._image, self.tensors = image, []

    def ranges(self) -> dict[str, tuple[int, int]]:
        """The first byte of each tensor in the file, and the one after its last."""
        head = len(self.head)
        described = cast("dict[str, dict[str, list[int]]]", self._entries)
        offsets = {name: entry["data_offsets"] for name, entry in described.items() if name != "__metadata__"}
        return {name: (head + begin, head + end) for name, (begin, end) in offsets.items()}

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file's bytes in pieces, of tensors (which are copied one at a time if need be) or of the image."""
        if self._image is not None:
            whole = bytes_of(self._image)
            yield from (whole[at : at + IMAGE_CHUNK_BYTES] for at in range(0, len(whole), IMAGE_CHUNK_BYTES))
            return
        yield self.head
        for tensor in self.tensors:
            values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            data = bytes_of(values)
            for begin in range(0, len(data), CHUNK_BYTES):
                yield data[begin : begin + CHUNK_BYTES]


def _place(tensor: Tensor) -> tuple[int, bool]:
    return -tensor.element_size(), bool(tensor.numel() * tensor.element_size() % _ALIGNMENT_BYTES)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    # one element is contiguous at any stride, also 0, at which torch gives no bytes
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def read_tensors(source: Source, device: torch.device) -> dict[str, Tensor]:
    """All tensors of a safetensors file, each in memory of its own.

    Raises:
        BadFileError: a header that is not one, or that does not fit the file's size; told before memory is taken.
    """
    tensors: dict[str, Tensor] = {}
    for entry in read_header(source):
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if tensor.numel():
            source.read_into(bytes_of(tensor))
        tensors[entry.name] = tensor.to(device)
    return tensors


def read_header(source: Source) -> list[TensorEntry]:
    """The tensors of a safetensors file in the order of their bytes; the source then stands at the first byte."""
    if source.size < 8:
        raise BadFileError(f"is too short for a safetensors file ({source.size} bytes)")
    header_bytes = int.from_bytes(source.read(8), "little")
    if header_bytes > min(_MAX_HEADER_BYTES, source.size - 8):
        raise BadFileError(f"has a header of {header_bytes} bytes in a file of {source.size}")
    try:
        header: object = json.loads(source.read(header_bytes))
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"has a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise BadFileError("has a header that is not a JSON object")
    entries = cast("dict[str, object]", header)
    entries.pop("__metadata__", None)
    # an empty tensor begins where the next one does, so the end counts as well
    described = sorted((_parse_entry(name, entry) for name, entry in entries.items()), key=lambda e: (e.begin, e.end))
    end = 0
    for entry in described:
        if entry.begin != end:
            raise BadFileError(f"has a gap or an overlap before tensor `{entry.name}`")
        end = entry.end
    if 8 + header_bytes + end != source.size:
        raise BadFileError(f"has {source.size} bytes, but its header describes {8 + header_bytes + end}")
    return described


def _parse_entry(name: str, entry: object) -> TensorEntry:
    match entry:
        case {"dtype": str(dtype_name), "shape": list(), "data_offsets": [int(begin), int(end)]}:
            dtype = DTYPES.get(dtype_name)
            if dtype is None:
                raise BadFileError(f"holds tensor `{name}` of the unknown dtype {dtype_name!r}")
            sizes = cast("dict[str, list[object]]", entry)["shape"]
            shape = tuple(size for size in sizes if type(size) is int and size >= 0)
            if len(shape) != len(sizes) or math.prod(max(size, 1) for size in shape) > _MAX_NUMEL:
                raise BadFileError(f"gives tensor `{name}` the shape {sizes}")
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise BadFileError(f"gives tensor `{name}` of shape {sizes} the bytes {begin} to {end}")
            return TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end)
        case _:
            raise BadFileError(f"describes tensor `{name}` in no known way")
