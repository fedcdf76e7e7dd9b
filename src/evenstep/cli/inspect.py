"""`evenstep inspect CHECKPOINT`: verifies a checkpoint and shows what is in it.

Every byte is read and compared with its checksum; nothing in it is executed. It changes nothing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from evenstep.checkpoint import read_checkpoint


def run(path: str, settings: list[str]) -> int:
    """Read the checkpoint, and print what it says of itself and how large its parts are."""
    assert not settings, "the command line takes none"
    checkpoint = read_checkpoint(Path(path))
    manifest = checkpoint.manifest
    print(f"{checkpoint.path}: update {manifest.update}, whole and undamaged")
    print(
        f"written {manifest.created} by evenstep {manifest.evenstep}, torch {manifest.torch}, Python {manifest.python}"
    )
    print("\nfiles")
    for name, entry in manifest.files.items():
        print(f"  {name:<32} {_bytes(entry.bytes):>10}  crc32 {entry.crc32}")
    print("\ncontents")
    for part, content in checkpoint.state.items():
        print(f"  {part:<16} {_summary(content)}")
    return 0


def _summary(content: object) -> str:
    tensors = list(_tensors(content))
    if not tensors:
        text = str(content)
        return text if len(text) <= 90 else f"{text[:87]}..."
    elements = sum(tensor.numel() for tensor in tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    kinds = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    return f"{len(tensors)} tensors, {elements:,} elements, {_bytes(size)}, {kinds}"


def _tensors(content: object) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping):
        for inner in cast("Mapping[object, object]", content).values():
            yield from _tensors(inner)
    elif isinstance(content, list | tuple):
        for inner in cast("list[object]", content):
            yield from _tensors(inner)


def _bytes(size: float) -> str:
    """A size for people.

    >>> _bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes every size")
