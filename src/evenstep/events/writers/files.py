"""Files of the run folder, to which whole lines are appended: metrics.jsonl, incidents.jsonl, shown.jsonl, metrics.csv.

On a resume, lines of updates that happen again are dropped, and a last line without an end.
"""

import csv
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from errno import ENOENT
from io import FileIO, StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, final

from evenstep.events.event import Event, Incident
from evenstep.events.files import append, appending, keep_lines
from evenstep.events.metrics.pairs import Record
from evenstep.events.shown import Shown, Text
from evenstep.events.writers.writer import Writer, run_file


class LinesWriter(Writer):
    """Base of writers that append lines to the file `file_name` of the run folder, whose first line is `header`."""

    file_name: str
    header: str = ""
    _file: FileIO | None = None

    @abstractmethod
    def lines(self, records: Sequence[Record]) -> str:
        """Lines of `records`, with line ends."""

    @abstractmethod
    def update_of(self, line: str) -> int:
        """Update of a line but the header; raises for a line of something else."""

    @property
    def path(self) -> Path:
        """The file; its name alone before it was opened."""
        return Path(self.file_name if self._file is None else str(self._file.name))

    @property
    def target(self) -> str:
        return f"`{self.path}`"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        path = run_file(self, folder, self.file_name)
        if path.exists():
            keep_lines(path, lambda line: line == f"{self.header}\n" or self.update_of(line) <= update)
        self._file = appending(path)
        if self.header and self._file.tell() == 0:
            append(self._file, f"{self.header}\n")

    def write(self, records: Sequence[Record]) -> None:
        assert self._file is not None, "opened before"
        if not self.path.exists():  # writing to a deleted file would raise nothing
            raise FileNotFoundError(ENOENT, "the file was deleted or moved away", str(self.path))
        append(self._file, self.lines(records))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@final
class JsonlWriter(LinesWriter):
    """Writes `metrics.jsonl`, `incidents.jsonl` and `shown.jsonl` into the run folder, and flushes after every call.

    A line of metrics.jsonl holds an update and its values; a late value makes another line of that update. Numbers that
    JSON lacks are the strings "nan", "inf" and "-inf". Weights are not kept.

    >>> writer = JsonlWriter()
    """

    file_name = "metrics.jsonl"

    def lines(self, records: Sequence[Record]) -> str:
        lines: list[str] = []
        for update, group in groupby(records, key=lambda record: record.update):
            values = {name: value if value - value == 0 else str(value) for _, name, value, _ in group}
            lines.append(json.dumps({"update": update, **values}) + "\n")
        return "".join(lines)

    def update_of(self, line: str) -> int:
        return int(json.loads(line)["update"])

    def open(self, folder: Path | None, update: int) -> None:
        super().open(folder, update)
        shown = self.path.with_name("shown.jsonl")
        if shown.exists():
            keep_lines(shown, lambda line: self.update_of(line) <= update)

    def event(self, name: str, event: Event) -> None:
        if isinstance(event, Incident):
            line = {"update": event.update, "kind": event.kind, "message": event.message, "details": event.details}
            line |= {name: value for name, value in event.facts().items() if name not in event.details}
            self._append("incidents.jsonl", line)
        elif isinstance(event, Shown):
            self._append("shown.jsonl", {"update": event.update, "name": event.name, **self._shown(event)})

    def _append(self, file_name: str, line: Mapping[str, Any]) -> None:
        with appending(self.path.with_name(file_name)) as file:
            append(file, json.dumps(line) + "\n")

    def _shown(self, event: Shown) -> dict[str, Any]:
        if isinstance(event.value, Text):
            return {"kind": "text", "text": event.value.text}
        name = f"shown/{event.name}/{event.update:08d}.png"
        path = self.path.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(event.value.png())
        return {"kind": "image", "file": name, "caption": event.value.caption}


@final
class CsvWriter(LinesWriter):
    """Writes `metrics.csv` into the run folder: a row is one value, (update, name, value, weight).

    >>> writer = CsvWriter()
    """

    file_name = "metrics.csv"
    header = "update,name,value,weight"

    def lines(self, records: Sequence[Record]) -> str:
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows(records)
        return text.getvalue()

    def update_of(self, line: str) -> int:
        return int(line.partition(",")[0])
