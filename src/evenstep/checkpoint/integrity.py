"""Whether the files of a checkpoint are those that its manifest names: all there, plain, of their sizes.

It looks at names and sizes, and at the content of the small JSON files. What the others hold is verified by the reader.
"""

from pathlib import Path
from typing import cast
from zlib import crc32

from evenstep.checkpoint.damage import UnreadableError, json_object, named_errors
from evenstep.checkpoint.folders import step_update
from evenstep.checkpoint.manifest import FileEntry, Manifest, read_manifest
from evenstep.checkpoint.state import JSON


def check_structure(path: Path) -> Manifest:
    """Compare names and sizes of the files in the step folder `path` with the manifest; reads no other content.

    Raises:
        UnreadableError: for the first file that is missing or of another size.
    """
    manifest = read_manifest(path)
    named = step_update(path.name)
    if named is not None and named != manifest.update:
        raise UnreadableError(f"`{path}` is the checkpoint of update {manifest.update}; give it back its name.")
    for name, entry in manifest.files.items():
        file = path / name
        with named_errors(file):
            if not file.is_file():
                raise UnreadableError(f"`{file}` is missing; take an older checkpoint.")
            size = file.stat().st_size
        if size != entry.bytes:
            raise UnreadableError(
                f"`{file}` has {size} bytes, but {entry.bytes} were written; take an older checkpoint."
            )
    return manifest


def check_checksum(path: Path | str, found: str, entry: FileEntry) -> None:
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
