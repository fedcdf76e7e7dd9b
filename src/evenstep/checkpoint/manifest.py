"""The manifest of a checkpoint: which files it has, of which size and checksum, and what wrote it.

It is written last, so a folder with a manifest is a complete checkpoint and one without is not. The checksums find
damage, also of the manifest itself; they are no signature and say nothing of who wrote it.
"""

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from evenstep.checkpoint.damage import UnreadableError, json_object, named_errors
from evenstep.version import __version__

MANIFEST = "manifest.json"
FORMAT = 1
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        crc32: its checksum, eight hexadecimal digits.
    """

    bytes: int
    crc32: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        format: version of the layout of the folder, `FORMAT` when written by this evenstep.
        evenstep, torch, python: versions that wrote it.
        update: number of committed updates in the state.
        created: time of writing, ISO 8601, UTC.
        ranks: how many processes wrote it together.
        resumed_from: the checkpoint that the run went on from before it wrote this one; None if it began afresh.
        files: name → entry, without the manifest itself.
    """

    format: int
    evenstep: str
    torch: str
    python: str
    update: int
    created: str
    ranks: int
    resumed_from: str | None
    files: Mapping[str, FileEntry]


def new_manifest(
    update: int, files: Mapping[str, FileEntry], *, ranks: int = 1, resumed_from: str | None = None
) -> Manifest:
    """The manifest of a checkpoint that is written now, by this software."""
    return Manifest(
        format=FORMAT,
        evenstep=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        update=update,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks=ranks,
        resumed_from=resumed_from,
        files=files,
    )


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of `manifest.json`."""
    content = asdict(manifest)
    return json.dumps({**content, "crc32": _checksum(content)}, indent=2).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint `folder`.

    Raises:
        UnreadableError: none there, a damaged one, or one of a newer evenstep; the message names the file.
    """
    path = folder / MANIFEST
    with named_errors(path):
        if not path.is_file():
            raise UnreadableError(f"`{path}` is not there, so `{folder}` is no complete checkpoint.")
        return parse_manifest(path.read_bytes(), path)


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """The manifest of which `data` are the content, as `path` for errors.

    Raises:
        UnreadableError: a damaged one, or one of a newer evenstep.
        BadFileError: something else.
    """
    fields: dict[str, Any] = json_object(data)
    written = fields.get("format")
    if type(written) is int and written > FORMAT:
        raise UnreadableError(
            f"`{path}` has format {written}, written by evenstep {fields.get('evenstep')}, but this is evenstep "
            f"{__version__}, which reads up to format {FORMAT}; upgrade evenstep."
        )
    checksum = fields.pop("crc32", None)
    if checksum != _checksum(fields):
        raise UnreadableError(f"`{path}` is damaged: its content does not have its checksum {checksum!r}.")
    files: dict[str, Any] = fields["files"]
    known: dict[str, Any] = {name: fields[name] for name in Manifest.__slots__}
    known["files"] = {name: FileEntry(bytes=file["bytes"], crc32=file["crc32"]) for name, file in files.items()}
    return Manifest(**known)


def _checksum(content: object) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"
