"""Whether a checkpoint can be trusted to be what was written: its files, their sizes, their checksums.

The check is against damage and against names that lead elsewhere; nothing that is read is executed. It does not
say whether the state fits a model.
"""

from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import final

from evenstep.checkpoint.checksum import AHEAD_PIECES, Checksum
from evenstep.checkpoint.layout import STATE, TENSORS_SUFFIX, step_update
from evenstep.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_manifest
from evenstep.checkpoint.sharding import TABLE
from evenstep.checkpoint.tensorfile import CHUNK_BYTES, BadFileError, read_header
from evenstep.errors import CheckpointError


def verify(path: Path) -> Manifest:
    """Read every byte of the checkpoint in the step folder `path` and compare it with the manifest.

    Raises:
        CheckpointError: the first thing that is wrong, with the file's name.
    """
    manifest = check_structure(path)
    verify_files(path, manifest.files)
    return manifest


def verify_files(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Read every byte of these files of the checkpoint in `path` and compare their checksums.

    Raises:
        CheckpointError: the first thing that is wrong, with the file's name.
    """
    buffers = deque([memoryview(bytearray(CHUNK_BYTES)) for _ in range(AHEAD_PIECES + 1)])
    for name, entry in files.items():
        with checked_file(path / name, entry) as file:
            if name.endswith(TENSORS_SUFFIX):
                read_header(file)
            elif name not in (STATE, TABLE):
                raise BadFileError("is of no known kind")
            while file.rest:
                buffers.rotate()  # the others are hashed while one is filled
                file.read_into(buffers[0][: file.rest])


def check_structure(path: Path) -> Manifest:
    """Compare names and sizes of the files in the step folder `path` with the manifest; reads no content.

    Hidden files are let pass: some file systems and desktops leave them.

    Raises:
        CheckpointError: the first thing that is wrong, with the file's name.
    """
    manifest = read_manifest(path)
    named = step_update(path.name)
    if named is not None and named != manifest.update:
        raise CheckpointError(
            f"`{path}` holds the checkpoint of update {manifest.update}, so it was renamed; give it its name back."
        )
    try:
        present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")} - {MANIFEST}
        if absent := manifest.files.keys() - present:
            raise CheckpointError(f"`{path / min(absent)}` is missing, although `{MANIFEST}` names it.")
        if spare := present - manifest.files.keys():
            raise CheckpointError(f"`{path / min(spare)}` is not of this checkpoint: `{MANIFEST}` does not name it.")
        if STATE not in manifest.files:
            raise CheckpointError(f"`{path / MANIFEST}` names no `{STATE}`, which every checkpoint has.")
        for name, entry in manifest.files.items():
            found = (path / name).lstat()
            if not S_ISREG(found.st_mode):
                raise CheckpointError(
                    f"`{path / name}` is a link, a folder or a device, not a plain file; do not trust it."
                )
            if found.st_size != entry.bytes:
                raise CheckpointError(
                    f"`{path / name}` has {found.st_size} bytes, but {entry.bytes} were written; take an older "
                    f"checkpoint."
                )
    except OSError as error:
        raise CheckpointError(f"`{error.filename or path}` cannot be read: {error.strerror}.") from error
    return manifest


@final
class CheckedFile:
    """A file that is read once from begin to end, its checksum taken on the way.

    Args:
        file: stands at its begin.
        size: its bytes.
        checksum: of what was read.
    """

    def __init__(self, file: FileIO, size: int, checksum: Checksum) -> None:
        self.size = size
        self.rest = size
        self._file = file
        self._checksum = checksum

    def read(self, num_bytes: int) -> bytes:
        """The next `num_bytes`."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer with the next bytes, which are hashed while those after them are read.

        It must not change before `AHEAD_PIECES` more calls have returned, or the checksum is taken.
        """
        for begin in range(0, len(buffer), CHUNK_BYTES):
            piece = buffer[begin : begin + CHUNK_BYTES]
            filled = 0
            while filled < len(piece):
                count = self._file.readinto(piece[filled:])
                if not count:
                    raise BadFileError(f"ends after {self.size - self.rest + filled} bytes")
                filled += count
            self.rest -= filled
            self._checksum.add(piece)


@contextmanager
def checked_file(path: Path, entry: FileEntry, *, whole: bool = True) -> Generator[CheckedFile, None, None]:
    """Open a file of a checkpoint to be read; at the end of the block its checksum is compared.

    Args:
        path: of the file.
        entry: what the manifest says of it.
        whole: whether all of it must be read in the block; if not, nothing is compared.

    Raises:
        CheckpointError: whatever is wrong with the file, also as a BadFileError in the block; names the file.
    """
    try:
        with FileIO(path, "rb") as raw, Checksum() as checksum:
            file = CheckedFile(raw, entry.bytes, checksum)
            yield file
            found = checksum.text()
    except BadFileError as error:
        raise CheckpointError(f"`{path}` {error}; it is damaged.") from error
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}.") from error
    if not whole:
        return
    if file.rest:
        raise CheckpointError(f"`{path}` holds {file.rest} bytes more than what is described; it is damaged.")
    if found != entry.crc32:
        raise CheckpointError(
            f"`{path}` is damaged: its checksum is {found}, but {entry.crc32} was written; take an older checkpoint."
        )
