"""metrics.jsonl: one JSON object per line, an update and its values; and incidents.jsonl, once there is one.

Values that come together for one update share a line; a late one makes another line of the same update, to be
merged when read. Numbers that JSON lacks are the strings "nan", "inf" and "-inf". Weights are not kept.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO, final

from evenstep.errors import EvenstepError
from evenstep.events.event import Event, Incident
from evenstep.events.files import keep_lines
from evenstep.events.series import Record
from evenstep.events.writers.writer import Writer, run_file

_update_of = itemgetter(0)


@final
class JsonlWriter(Writer):
    """Writes `metrics.jsonl` into the run folder, and flushes after every call.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     writer = JsonlWriter()
    ...     writer.open(Path(folder), 0)
    ...     writer.write([Record(1, "train/loss", 0.5, 32.0), Record(1, "train/lr", 0.001, 1.0)])
    ...     writer.close()
    ...     Path(folder, "metrics.jsonl").read_text()
    '{"update": 1, "train/loss": 0.5, "train/lr": 0.001}\\n'
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: TextIO | None = None
        self._keys: dict[str, str] = {}

    @property
    def target(self) -> str:
        return f"`{self._path or 'metrics.jsonl'}`"

    def open(self, folder: Path | None, update: int) -> None:
        self.close()
        self._path = path = run_file(self, folder, "metrics.jsonl")
        if path.exists():
            keep_lines(path, lambda line: _read_update(path, line) <= update)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def write(self, records: Sequence[Record]) -> None:
        assert self._file is not None, "opened before"
        for update, group in groupby(records, key=_update_of):
            self._file.write(f'{{"update": {update}{"".join(map(self._member, group))}}}\n')
        self._file.flush()

    def event(self, name: str, event: Event) -> None:
        """Append an incident to incidents.jsonl: {"update", "kind", "message", "details"}, and where it happened."""
        if isinstance(event, Incident):
            assert self._path is not None, "opened before"
            line = {"update": event.update, "kind": event.kind, "message": event.message, "details": event.details}
            line |= {name: value for name, value in event.facts().items() if name not in event.details}
            with self._path.with_name("incidents.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _member(self, record: Record) -> str:
        _, name, value, _ = record
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = f", {json.dumps(name)}: "
        return f"{key}{value!r}" if value - value == 0 else f'{key}"{value!r}"'


def _read_update(path: Path, line: str) -> int:
    try:
        values: Any = json.loads(line)
        return int(values["update"])
    except (ValueError, KeyError, TypeError) as error:
        raise EvenstepError(
            f"`{path}` holds a line that this writer did not write: {line.strip()[:80]!r}; move the file away or "
            f"repair it."
        ) from error
