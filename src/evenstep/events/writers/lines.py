"""The base of writers that append lines to a file of the run folder, whole ones with every call.

When a run is resumed, the lines of updates that are about to happen again are dropped, and a last line that was never
ended. What a line looks like is its subclasses' business.
"""

from abc import abstractmethod
from collections.abc import Sequence
from errno import ENOENT
from io import FileIO
from pathlib import Path

from evenstep.errors import EvenstepError
from evenstep.events.files import append, appending, keep_lines
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer, run_file


class LinesWriter(Writer):
    """Appends lines to a file.

    Args:
        file_name: of the file in the run folder.
        header: its first line, "" for none.

    >>> from tempfile import TemporaryDirectory
    >>> class Values(LinesWriter):
    ...     def lines(self, records):
    ...         return "".join(f"{record.update} {record.value}\\n" for record in records)
    ...     def update_of(self, line):
    ...         return int(line.split()[0])
    >>> with TemporaryDirectory() as folder:
    ...     writer = Values("values.txt")
    ...     writer.open(Path(folder), 0)
    ...     writer.write([Record(1, "train/loss", 0.5, 32.0)])
    ...     writer.close()
    ...     Path(folder, "values.txt").read_text()
    '1 0.5\\n'
    """

    def __init__(self, file_name: str, header: str = "") -> None:
        self._file_name = file_name
        self._header = header
        self._path: Path | None = None
        self._file: FileIO | None = None

    @abstractmethod
    def lines(self, records: Sequence[Record]) -> str:
        """What is written for `records`, with the ends of lines."""

    @abstractmethod
    def update_of(self, line: str) -> int:
        """The update that a line is about.

        Raises:
            ValueError: this writer did not write it; so for TypeError and KeyError.
        """

    @property
    def path(self) -> Path:
        """The file, once it was opened."""
        assert self._path is not None, "opened before"
        return self._path

    @property
    def target(self) -> str:
        return f"`{self._path or self._file_name}`"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        self._path = path = run_file(self, folder, self._file_name)
        if self._is_there(path):
            keep_lines(path, lambda line: self._checked_update_of(line) <= update)
        self._file = appending(path)
        if self._header and self._file.tell() == 0:
            append(self._file, f"{self._header}\n")

    def check(self, folder: Path) -> None:
        """Raise EvenstepError if the file that is in `folder` already can't be gone on with."""
        self._path = path = folder / self._file_name
        if self._is_there(path):
            with path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.endswith("\n"):
                        self._checked_update_of(line)

    def write(self, records: Sequence[Record]) -> None:
        assert self._file is not None, "opened before"
        if not self.path.exists():  # what is written to a deleted file is lost without an error
            what = "the file was deleted or moved away, with all that was in it"
            raise FileNotFoundError(ENOENT, what, str(self.path))
        append(self._file, self.lines(records))

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _is_there(self, path: Path) -> bool:
        if path.exists() and not path.is_file():  # whoever reads a pipe waits
            raise EvenstepError(f"`{path}` must be a file to be written to, but is none; move it away.")
        return path.exists()

    def _checked_update_of(self, line: str) -> int:
        if self._header and line.rstrip("\n") == self._header:
            return 0
        try:
            return self.update_of(line)
        except (ValueError, KeyError, TypeError) as error:
            raise EvenstepError(
                f"`{self._path}` holds a line that this writer did not write: {line.strip()[:80]!r}; move the file "
                f"away or repair it."
            ) from error
