"""Files of tensors in the safetensors format, with a checksum of each 128 KiB of a tensor.

Checksums are kept beside the files, so a rank that reads a part of a tensor verifies the chunks of that part alone.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
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
    return FileEntry(bytes=path.stat().st_size, crc32=_header_crc32(path, values)), summed.result()


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
    data = _bytes_of(value)
    return [crc32(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]


class TensorFile:
    """A file of tensors, mapped into memory; `stored` are its tensors by name, read when they are used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with named_errors(path), safe_open(path, framework="pt") as opened:
                self.stored: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        except SafetensorError as error:
            raise UnreadableError(f"`{path}` is no whole safetensors file ({error}); it is damaged.") from error

    def header_crc32(self) -> str:
        """Checksum of the bytes before the values."""
        with named_errors(self.path):
            return _header_crc32(self.path, self.stored)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """A copy of the rows `begin` to `end` of a tensor; the whole of a tensor without dimensions."""
        # aligned as a fresh tensor, so that a resumed run computes the same bits
        stored = self.stored[name]
        return (stored[begin:end] if stored.ndim else stored).clone()

    def is_sound(self, name: str, chunks: Iterable[int], checksums: Sequence[int]) -> bool:
        """True if the chunks with these numbers have their checksums."""
        data = _bytes_of(self.stored[name])
        return all(
            crc32(data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]) == checksums[number] for number in chunks
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    # torch gives no bytes of stride 0, at which one element is contiguous as well
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _header_crc32(path: Path, values: Mapping[str, Tensor]) -> str:
    header_bytes = path.stat().st_size - sum(value.nbytes for value in values.values())
    with path.open("rb") as file:
        return digits(crc32(file.read(header_bytes)))
