"""The safetensors format, written and read tensor by tensor with the checksum taken on the way.

A file is the length of a JSON header, the header (name → dtype, shape, range of bytes), then all values without
gaps, so `safetensors.torch.load_file` reads what is written here. The library itself is not used, because it can
neither sync nor report a checksum of what it writes, nor check one while it reads without another copy; each tensor
is read into memory of its own, aligned as a fresh one is, so that a resumed run computes the same bits.
Reference: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep.checkpoint.damage import BadFileError, json_object
from evenstep.checkpoint.state import DTYPE_NAMES
from evenstep.checkpoint.table import DTYPES, TensorEntry, TensorPiece

CHUNK_BYTES = 4 << 20
IMAGE_CHUNK_BYTES = 32 << 20
_ALIGNMENT_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"


class TensorFile:
    """The bytes of a safetensors file of these tensors: how many, and, in order, which.

    They come from the tensors themselves or, if they may change before, from an image of the file in memory.

    Args:
        tensors: name → tensor, on any device, of a dtype in `DTYPE_NAMES`, with any strides.

    Attributes:
        ranges: the first byte of each tensor in the file, and the one after its last.

    >>> file = TensorFile({"bias": torch.zeros(2)})
    >>> file.size, b"".join(file.chunks())[8:40]
    (136, b'{"__metadata__":{"format":"pt"},')
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # the widest first: every tensor then begins at a multiple of its element size, most at one of a cache line
        order = sorted(tensors, key=lambda name: _place(tensors[name]))
        entries: dict[str, object] = {_METADATA: {"format": "pt"}}
        ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for name in order:
            tensor = tensors[name]
            begin, end = end, end + tensor.numel() * tensor.element_size()
            ranges[name] = begin, end
            entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            entries[name] = entry
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-(8 + len(header)) % _ALIGNMENT_BYTES)
        self.head = len(header).to_bytes(8, "little") + header
        self.tensors = [tensors[name] for name in order]
        self.size = len(self.head) + end
        self.ranges = {name: (len(self.head) + begin, len(self.head) + end) for name, (begin, end) in ranges.items()}
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
        self._image, self.tensors = image, []

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


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        BadFileError: a header that is not one, or that does not fit the file's size; told before memory is taken.
    """
    with path.open("rb") as file:
        size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise BadFileError(f"has a header of {header_bytes} bytes in a file of {size}")
        encoded = file.read(header_bytes)
    begin = 8 + header_bytes
    described = json_object(encoded, "has a header that ").items()
    try:
        entries = [
            (name, _parse_entry(name, entry, path.name, begin)) for name, entry in described if name != _METADATA
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFileError("has a header that describes no tensors") from error
    # an empty tensor begins where the next one does, so the end counts as well
    table = dict(sorted(entries, key=lambda one: (one[1].pieces[0].begin, one[1].pieces[0].end)))
    end = begin
    for name, entry in table.items():
        if entry.pieces[0].begin != end:
            raise BadFileError(f"has a gap or an overlap before tensor `{name}`")
        end = entry.pieces[0].end
    if end != size:
        raise BadFileError(f"has {size} bytes, but its header describes {end}")
    return table


def _parse_entry(name: str, entry: Any, file: str, head: int) -> TensorEntry:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise BadFileError(f"holds tensor `{name}` of the unknown dtype {entry['dtype']!r}")
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise BadFileError(f"gives tensor `{name}` of shape {list(shape)} the bytes {begin} to {end}")
    piece = TensorPiece(offsets=(0,) * len(shape), sizes=shape, file=file, begin=head + begin, end=head + end)
    return TensorEntry(dtype=dtype, shape=shape, pieces=(piece,))
