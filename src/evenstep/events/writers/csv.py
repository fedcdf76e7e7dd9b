"""metrics.csv: one row per value, (update, name, value, weight), so that a metric may begin at any time.

Values are written so that reading them gives the same number. This is the long form; a wide table is one pivot away.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, final

from evenstep.errors import EvenstepError
from evenstep.events.files import keep_lines
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer, run_file

_HEADER = "update,name,value,weight"


@final
class CsvWriter(Writer):
    """Writes `metrics.csv` into the run folder, and flushes after every call.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = CsvWriter()
    ...     writer.open(Path(folder), 0)
    ...     writer.write([Record(1, "train/loss", 0.5, 32.0)])
    ...     writer.close()
    ...     Path(folder, "metrics.csv").read_text().splitlines()
    ['update,name,value,weight', '1,train/loss,0.5,32.0']
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: TextIO | None = None

    @property
    def target(self) -> str:
        return f"`{self._path or 'metrics.csv'}`"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        self._path = path = run_file(self, folder, "metrics.csv")
        if path.exists():
            keep_lines(path, lambda line: _read_update(path, line) <= update)
        self._file = path.open("a", encoding="utf-8", newline="")
        if self._file.tell() == 0:
            self._file.write(f"{_HEADER}\n")
            self._file.flush()

    def write(self, records: Sequence[Record]) -> None:
        assert self._file is not None, "opened before"
        csv.writer(self._file, lineterminator="\n").writerows(records)
        self._file.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _read_update(path: Path, line: str) -> int:
    if line.rstrip("\n") == _HEADER:
        return 0
    try:
        return int(line.partition(",")[0])
    except ValueError as error:
        raise EvenstepError(
            f"`{path}` holds a row that this writer did not write: {line.strip()[:80]!r}; move the file away or "
            f"repair it."
        ) from error
