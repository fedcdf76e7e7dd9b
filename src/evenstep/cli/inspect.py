"""`evenstep inspect CHECKPOINT [--verify] [--diff OTHER]`: shows what is in a checkpoint; changes nothing.

Nothing in it is executed. Names, sizes and structure are always checked; with `--verify` every byte is read and
compared with its checksum.
"""

import math
from pathlib import Path
from typing import Any

from evenstep.arguments import format_name, shortened
from evenstep.checkpoint import CheckpointReader
from evenstep.cli.difference import differences
from evenstep.process import EXIT_DONE, EXIT_ERROR


def run(path: str, settings: list[str], *, verify: bool, diff: Path | None) -> int:
    """Print what the checkpoint says of itself, its files and its parts, or what differs in another."""
    assert not settings, "the command line takes none"
    contents = CheckpointReader(path)
    if diff is not None:
        return _diff(contents, CheckpointReader(diff), verify_both=verify)
    if verify:
        contents.verify()
    manifest = contents.manifest
    state = "whole and undamaged" if verify else "complete; --verify reads every byte"
    print(f"{contents.path}: update {manifest.update}, {state}")
    by = f"by {manifest.ranks} rank{'s' if manifest.ranks > 1 else ''}"
    software = f"evenstep {manifest.evenstep}, torch {manifest.torch}, Python {manifest.python}"
    print(f"written {manifest.created} {by}, {software}")
    print(f"resumed from {manifest.resumed_from or 'nothing: the run began afresh'}")
    print("\nfiles")
    for name, entry in manifest.files.items():
        print(f"  {name:<32} {spell_bytes(entry.bytes):>10}  crc32 {entry.crc32}")
    print("\ncontents")
    for part, values in contents.values.items():
        print(f"  {part:<16} {_summary(contents, part, values)}")
    return EXIT_DONE


def _diff(one: CheckpointReader, other: CheckpointReader, *, verify_both: bool) -> int:
    if verify_both:
        one.verify()
        other.verify()
    print(f"a {one.path}: update {one.manifest.update}\nb {other.path}: update {other.manifest.update}\n")
    lines = list(differences(one, other))
    print("\n".join(lines) if lines else f"no difference in {len(one.tensors)} tensors and all other values")
    return EXIT_ERROR if lines else EXIT_DONE


def _summary(contents: CheckpointReader, part: str, values: Any) -> str:
    tensors = [entry for name, entry in contents.tensors.items() if name.partition("/")[0] == part]
    if not tensors:
        return shortened(str(values), 90)
    elements = [math.prod(entry.shape) for entry in tensors]
    size = sum(count * entry.dtype.itemsize for count, entry in zip(elements, tensors, strict=True))
    kinds = ", ".join(sorted({format_name(entry.dtype) for entry in tensors}))
    plural = "s" if len(tensors) > 1 else ""
    return f"{len(tensors)} tensor{plural}, {sum(elements):,} elements, {spell_bytes(size)}, {kinds}"


def spell_bytes(size: float) -> str:
    """A size for people.

    >>> spell_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes every size")
