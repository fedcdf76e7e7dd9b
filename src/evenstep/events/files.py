"""Small text files of a run folder, which a killed process never leaves half written."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import chain, count
from pathlib import Path
from typing import final

from evenstep.errors import EvenstepError
from evenstep.events.event import Incident
from evenstep.files import replacing

FILES_PER_KIND = 50


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
    """Drop the lines of the file `path` for which `keep` is false, and a last line without an end."""

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
    """Append the whole `text` to `file`, or raise OSError and append nothing of it."""
    left = memoryview(text.encode())
    end = file.seek(0, os.SEEK_END)
    try:
        while left:
            left = left[file.write(left) :]
    except BaseException:
        with suppress(OSError):
            file.truncate(end)
        raise


@final
class IncidentFiles:
    """Writes the incidents of one rank into the folder `incidents` of the run: the first 50 files of each kind.

    Args:
        folder: run folder; None writes nothing.
        makes_folder: create the run folder if it is missing.
    """

    def __init__(self, folder: Path | None, *, makes_folder: bool = True) -> None:
        self._run = folder
        self._makes_folder = makes_folder
        self._written: Counter[str] = Counter()

    def write(self, incident: Incident) -> None:
        """Write one incident. A disk that takes no file is reported on stderr."""
        if self._run is None or self._written[incident.kind] >= FILES_PER_KIND:
            return
        if not self._makes_folder and not self._run.exists():
            return  # the first rank has removed it
        self._written[incident.kind] += 1
        rank = "" if incident.rank is None else f" on rank {incident.rank}"
        lines = [f"{incident.kind} at update {incident.update}{rank}", "", incident.message, ""]
        lines += [f"{name}: {json.dumps(value)}" for name, value in incident.facts().items()]
        lines += ["", incident.traceback.rstrip()] if incident.traceback else []
        stem = f"{incident.update:08d}-{incident.kind}{rank.replace(' on rank ', '-rank-')}"
        names = chain([f"{stem}.txt"], (f"{stem}-{number}.txt" for number in count(2)))
        folder = self._run / "incidents"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = next(path for path in (folder / name for name in names) if not path.exists())
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"evenstep: incidents can't be written to {folder}: {error}", file=sys.stderr, flush=True)
