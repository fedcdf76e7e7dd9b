"""metrics.jsonl: one JSON object per line, an update and its values; and incidents.jsonl, once there is one.

Values that come together for one update share a line; a late one makes another line of the same update, to be
merged when read. Numbers that JSON lacks are the strings "nan", "inf" and "-inf". Weights are not kept.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import final

from evenstep.events.event import Event, Incident
from evenstep.events.series import Record
from evenstep.events.writers.lines import LinesWriter

_update_of = itemgetter(0)


@final
class JsonlWriter(LinesWriter):
    """Writes `metrics.jsonl` into the run folder, and flushes after every call.

    >>> from pathlib import Path
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
        super().__init__("metrics.jsonl")
        self._keys: dict[str, str] = {}

    def lines(self, records: Sequence[Record]) -> str:
        keys, parts = self._keys, list[str]()
        for update, group in groupby(records, key=_update_of):
            parts.append(f'{{"update": {update}')
            for _, name, value, _ in group:
                key = keys.get(name)
                if key is None:
                    key = keys[name] = f", {json.dumps(name)}: "
                parts.append(f"{key}{value!r}" if value - value == 0 else f'{key}"{value!r}"')
            parts.append("}\n")
        return "".join(parts)

    def update_of(self, line: str) -> int:
        return int(json.loads(line)["update"])

    def event(self, name: str, event: Event) -> None:
        """Append an incident to incidents.jsonl: {"update", "kind", "message", "details"}, and where it happened."""
        if isinstance(event, Incident):
            line = {"update": event.update, "kind": event.kind, "message": event.message, "details": event.details}
            line |= {name: value for name, value in event.facts().items() if name not in event.details}
            with self.path.with_name("incidents.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
