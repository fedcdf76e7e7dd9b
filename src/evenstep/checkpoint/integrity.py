"""Whether the files of a checkpoint are those that its manifest names: all there, plain, of their sizes.

It looks at names and sizes, and at the content of the small JSON files. What the others hold is verified by the reader.
"""

from pathlib import Path
from stat import S_ISREG
from typing import cast
from zlib import crc32

from evenstep.checkpoint.damage import BadFileError, UnreadableError, json_object, named_errors
from evenstep.checkpoint.folders import STATE, TENSORS_SUFFIX, step_update
from evenstep.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from evenstep.checkpoint.state import JSON
from evenstep.checkpoint.table import TABLE


def check_structure(path: Path) -> Manifest:
    """Compare names and sizes of the files in the step folder `path` with the manifest; reads no other content.

    Hidden files are let pass: some file systems and desktops leave them.

    Raises:
        UnreadableError: the first thing that is wrong, with the file's name.
    """
    manifest = read_manifest(path)
    named = step_update(path.name)
    if named is not None and named != manifest.update:
        raise UnreadableError(
            f"`{path}` holds the checkpoint of update {manifest.update}, so it was renamed; give it its name back."
        )
    with named_errors(path):
        present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")} - {MANIFEST}
        if absent := manifest.files.keys() - present:
            raise UnreadableError(f"`{path / min(absent)}` is missing, although `{MANIFEST}` names it.")
        if spare := present - manifest.files.keys():
            raise UnreadableError(f"`{path / min(spare)}` is not of this checkpoint: `{MANIFEST}` does not name it.")
    if STATE not in manifest.files:
        raise UnreadableError(f"`{path / MANIFEST}` names no `{STATE}`, which every checkpoint has.")
    for name, entry in manifest.files.items():
        with named_errors(path / name):
            _check_file(path / name, entry)
    return manifest


def _check_file(path: Path, entry: FileEntry) -> None:
    if not path.name.endswith(TENSORS_SUFFIX) and path.name not in (STATE, TABLE):
        raise BadFileError("is of no known kind")
    found = path.lstat()
    if not S_ISREG(found.st_mode):
        raise UnreadableError(f"`{path}` is a link, a folder or a device, not a plain file; do not trust it.")
    if found.st_size != entry.bytes:
        raise UnreadableError(
            f"`{path}` has {found.st_size} bytes, but {entry.bytes} were written; take an older checkpoint."
        )


def check_checksum(path: Path | str, found: str, entry: FileEntry) -> None:
    """Raise UnreadableError unless `found` is what was written of the file `path`."""
    if found != entry.crc32:
        raise UnreadableError(
            f"`{path}` is damaged: its checksum is {found}, but {entry.crc32} was written; take an older checkpoint."
        )


def read_json(path: Path, entry: FileEntry) -> dict[str, JSON]:
    """The object in the JSON file `path`, whose checksum is compared.

    Raises:
        UnreadableError: it is not as it was written, or holds something else.
    """
    with named_errors(path):
        data = path.read_bytes()
        check_checksum(path, f"{crc32(data):08x}", entry)
        return cast("dict[str, JSON]", json_object(data))
