"""Files of tensors in the safetensors format, with a checksum of each 128 KiB of a tensor.

Checksums are kept beside the files, so a rank that reads a part of a tensor verifies the chunks of that part alone.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from evenstep import files
from evenstep.checkpoint.manifest import FileEntry, UnreadableError, digits, named_errors
from evenstep.checkpoint.ranks import in_background

SUFFIX = ".safetensors"
CHUNK_BYTES = 128 << 10
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
"""The dtypes of safetensors files."""
_LENGTH_BYTES = 8
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileEntry, Mapping[str, Sequence[int]]]:
    """Write and sync the new file `path` of tensors by name; those that are not on the CPU are copied first.

    Returns:
        The entry of the file, and the checksums of each tensor's chunks by name.
    """
    values = {name: one.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, one in tensors.items()}
    summed = in_background(lambda: {name: checksums(value) for name, value in values.items()})
    save(path, values)
    files.sync_path(path)
    return FileEntry(bytes=path.stat().st_size, crc32=digits(crc32(_header(path)))), summed.result()


def save(path: Path, values: Mapping[str, Tensor]) -> None:
    """Write contiguous CPU tensors into the file `path`, of the mode of any new file."""
    specs = {
        name: TensorSpec(
            dtype=str(value.dtype).removeprefix("torch."),
            shape=list(value.shape),
            data_ptr=value.data_ptr(),
            data_len=value.nbytes,
        )
        for name, value in values.items()
    }
    path.touch()
    mode = path.stat().st_mode
    try:
        serialize_file(specs, path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    path.chmod(mode)  # the library's own is for the owner alone


def checksums(value: Tensor) -> list[int]:
    """CRC-32 of each `CHUNK_BYTES` of a contiguous CPU tensor."""
    # torch gives no bytes of stride 0, at which one element is contiguous as well
    data = value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().data
    return [crc32(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]


class TensorFile:
    """A file of tensors; `stored` are its tensors by name, mapped into memory.

    `read` does not take values from the mapping: a disk is read up to three times as fast into fresh memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with named_errors(path), safe_open(path, framework="pt") as opened:
                self.stored: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        except SafetensorError as error:
            raise UnreadableError(f"`{path}` is no whole safetensors file ({error}); it is damaged.") from error
        with named_errors(path):
            header = _header(path)
        self.header_crc32 = digits(crc32(header))
        places = json.loads(header[_LENGTH_BYTES:])
        self._begins = {name: len(header) + places[name]["data_offsets"][0] for name in self.stored}

    def read(self, name: str, chunks: Sequence[int], checksums: Sequence[int]) -> Tensor | None:
        """Bytes of the chunks with these numbers of a tensor, one after the other; None if one has another checksum."""
        num_bytes = self.stored[name].nbytes
        sizes = [min(CHUNK_BYTES, num_bytes - number * CHUNK_BYTES) for number in chunks]
        read = torch.empty(sum(sizes), dtype=torch.uint8)
        left = read.numpy().data
        with named_errors(self.path), self.path.open("rb") as file:
            for number, size in zip(chunks, sizes, strict=True):
                file.seek(self._begins[name] + number * CHUNK_BYTES)
                if file.readinto(left[:size]) != size or crc32(left[:size]) != checksums[number]:
                    return None
                left = left[size:]
        return read


def _header(path: Path) -> bytes:
    """The bytes before the values: the length of a JSON object, and the object."""
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        return length + file.read(int.from_bytes(length, "little"))
