"""Small text files of a run folder, which a killed process never leaves half written."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.files import replacing


def replace_text(path: Path, text: str) -> None:
    """Replace the content of the file `path`; readers see the old content or the new, never a part.

    Raises:
        EvenstepError: it cannot be written; the old content stays.
    """
    with writing(path, then="resume it"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path, *, then: str) -> Generator[None]:
    """Turn an OSError inside the `with` into an EvenstepError that names `path` and what to do."""
    try:
        yield
    except OSError as error:
        raise EvenstepError(
            f"`{path}` cannot be written: {error.strerror or error}; make room or give the run a folder that it may "
            f"write to, then {then}."
        ) from error


def keep_lines(path: Path, keep: Callable[[str], bool]) -> None:
    """Drop the lines of the file `path` for which `keep` is false, and a last line without an end.

    Raises:
        OSError: it cannot be read or written; the old content stays.
    """

    def stays(line: bytes) -> bool:
        return line.endswith(b"\n") and keep(line.decode(errors="replace"))

    with path.open("rb") as file:
        if not all(stays(line) for line in file):
            file.seek(0)
            with replacing(path) as new, new.open("wb") as kept:
                kept.writelines(filter(stays, file))


def appending(path: Path) -> FileIO:
    """Open the file `path` for `append`, without a buffer, which `close` would still write after a failure."""
    return FileIO(path, "a")


def append(file: FileIO, text: str) -> None:
    """Append the whole `text` to `file`, or nothing of it.

    Raises:
        OSError: it cannot be written.
    """
    left = memoryview(text.encode())
    end = file.seek(0, os.SEEK_END)
    try:
        while left:
            left = left[file.write(left) :]
    except BaseException:
        with suppress(OSError):
            file.truncate(end)
        raise
