"""Manifest of a checkpoint: its files with sizes and checksums, and the software that wrote it.

It is written last, so a folder with a manifest is a complete checkpoint.
"""

import json
import platform
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast, final
from zlib import crc32

import torch

from evenstep.checkpoint.folders import MANIFEST, step_update
from evenstep.errors import CheckpointError
from evenstep.version import __version__

FORMAT = 2


@final
class UnreadableError(CheckpointError):
    """A checkpoint that is damaged, foreign or of another format; an older one may be sound."""


class FileEntry(NamedTuple):
    """Size of a file; and `digits` of the checksum of a JSON file, or of the header of a file of tensors."""

    bytes: int
    crc32: str


class Manifest(NamedTuple):
    """Description of a checkpoint.

    Args:
        format: version of the layout of the folder.
        update: number of committed updates in the state.
        created: time of writing, ISO 8601, UTC.
        ranks: number of processes that wrote it together.
        resumed_from: the checkpoint that the run was resumed from; None for a new run.
        files: entry of each file by name, without the manifest itself.
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


def manifest_bytes(update: int, files: Mapping[str, FileEntry], *, ranks: int, resumed_from: str | None) -> bytes:
    """Content of `manifest.json` of a checkpoint that is written now."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    versions = FORMAT, __version__, torch.__version__, platform.python_version()
    content = Manifest(*versions, update, created, ranks, resumed_from, files)._asdict()
    content["files"] = {name: entry._asdict() for name, entry in files.items()}
    return json.dumps({**content, "crc32": _checksum(content)}, indent=2).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint `folder`."""
    path = folder / MANIFEST
    fields = _json_object(_content(path), path)
    if fields.get("format") != FORMAT:
        raise UnreadableError(
            f"`{path}` has format {fields.get('format')}, but evenstep {__version__} reads format {FORMAT}; read it "
            f"with evenstep {fields.get('evenstep')}."
        )
    if fields.pop("crc32", None) != _checksum(fields):
        raise damaged(path)
    files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
    return Manifest(**fields, files=files)


def check_structure(path: Path) -> Manifest:
    """Manifest of the step folder `path`, compared with the names and sizes of its files."""
    manifest = read_manifest(path)
    if step_update(path.name) not in (None, manifest.update):
        raise UnreadableError(f"`{path}` is the checkpoint of update {manifest.update}; give it back its name.")
    for name, entry in manifest.files.items():
        file = path / name
        with named_errors(file):
            size = file.stat().st_size
        if size != entry.bytes:
            raise UnreadableError(f"`{file}` has {size} bytes instead of {entry.bytes}; take an older checkpoint.")
    return manifest


def read_json(step: Path, name: str, manifest: Manifest) -> dict[str, Any]:
    """The object in the JSON file `name` of the checkpoint `step`."""
    path = step / name
    data = _content(path)
    if name not in manifest.files or digits(crc32(data)) != manifest.files[name].crc32:
        raise damaged(path)
    return _json_object(data, path)


def damaged(path: Path) -> UnreadableError:
    return UnreadableError(f"`{path}` is damaged: its checksum differs from the written one; take an older checkpoint.")


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Raise an UnreadableError with the name of the file for an OSError inside the `with`."""
    try:
        yield
    except OSError as error:
        raise UnreadableError(
            f"`{error.filename or path}` cannot be read: {error.strerror}; take an older checkpoint."
        ) from error


def digits(checksum: int) -> str:
    return f"{checksum:08x}"


def _content(path: Path) -> bytes:
    with named_errors(path):
        return path.read_bytes()


def _json_object(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"`{path}` is not JSON ({error}); it is damaged.") from error
    if not isinstance(content, dict):
        raise UnreadableError(f"`{path}` is not a JSON object; it is damaged.")
    return cast("dict[str, Any]", content)


def _checksum(content: object) -> str:
    return digits(crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()))
