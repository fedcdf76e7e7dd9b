"""metrics.jsonl: one JSON object per line, an update and its values; incidents.jsonl and shown.jsonl, once needed.

Values that come together for one update share a line; a late one makes another line of the same update, to be
merged when read. Numbers that JSON lacks are the strings "nan", "inf" and "-inf". Weights are not kept. Images are PNG
files in the folder `shown`, which lines of shown.jsonl name.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import cast, final

from evenstep.events.event import Event, Incident, Json
from evenstep.events.files import append, appending, keep_lines
from evenstep.events.series import Record
from evenstep.events.shown import Image, Shown, Text
from evenstep.events.writers.lines import LinesWriter

_update_of = itemgetter(0)


@lru_cache(maxsize=4096)
def _key(name: str) -> str:
    return f", {json.dumps(name)}: "


@final
class JsonlWriter(LinesWriter):
    """Writes `metrics.jsonl`, `incidents.jsonl` and `shown.jsonl` into the run folder, and flushes after every call.

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

    def lines(self, records: Sequence[Record]) -> str:
        parts = list[str]()
        for update, group in groupby(records, key=_update_of):
            parts.append(f'{{"update": {update}')
            for _, name, value, _ in group:
                parts.append(f"{_key(name)}{value!r}" if value - value == 0 else f'{_key(name)}"{value!r}"')
            parts.append("}\n")
        return "".join(parts)

    def update_of(self, line: str) -> int:
        return int(json.loads(line)["update"])

    def open(self, folder: Path | None, update: int) -> None:
        super().open(folder, update)
        shown = self.path.with_name("shown.jsonl")
        if shown.exists():  # what was shown later is about to be shown again
            keep_lines(shown, lambda line: self.update_of(line) <= update)

    def event(self, name: str, event: Event) -> None:
        """Append an incident to incidents.jsonl: {"update", "kind", "message", "details"}, and where it happened.

        And what is shown to shown.jsonl: {"update", "name", "kind"} with "text", or "file" and "caption", or "edges",
        "counts" and "num_not_finite".
        """
        if isinstance(event, Incident):
            line = {"update": event.update, "kind": event.kind, "message": event.message, "details": event.details}
            line |= {name: value for name, value in event.facts().items() if name not in event.details}
            self._append("incidents.jsonl", line)
        elif isinstance(event, Shown):
            self._append("shown.jsonl", {"update": event.update, "name": event.name, **self._shown(event)})

    def _append(self, file_name: str, line: Mapping[str, object]) -> None:
        with appending(self.path.with_name(file_name)) as file:
            append(file, json.dumps(line) + "\n")

    def _shown(self, event: Shown) -> dict[str, Json]:
        value = event.value
        if isinstance(value, Text):
            return {"kind": "text", "text": value.text}
        if isinstance(value, Image):
            name = f"shown/{event.name}/{event.update:08d}.png"
            path = self.path.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value.png())
            return {"kind": "image", "file": name, "caption": value.caption}
        edges, counts = cast("list[Json]", value.edges), cast("list[Json]", value.counts)
        return {"kind": "histogram", "edges": edges, "counts": counts, "num_not_finite": value.num_not_finite}
