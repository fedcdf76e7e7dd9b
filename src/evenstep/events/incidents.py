"""Readable files of incidents, one each, in the folder `incidents` of the run."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import final

from evenstep.events.event import Incident

FILES_PER_KIND = 50


@final
class IncidentFiles:
    """Writes the incidents of one rank: the first files of each kind; incidents.jsonl has all.

    Args:
        folder: run folder; None writes nothing.
        makes_folder: create the run folder if it is missing.
    """

    def __init__(self, folder: Path | None, *, makes_folder: bool = True) -> None:
        self._makes_folder = makes_folder
        self._folder = None if folder is None else folder / "incidents"
        self._written: Counter[str] = Counter()
        self._has_failed = False

    def write(self, incident: Incident) -> Path | None:
        """Write one incident; returns its file, or None. A disk that takes no file is reported once, on stderr."""
        folder = self._folder
        if folder is None or self._written[incident.kind] >= FILES_PER_KIND:
            return None
        self._written[incident.kind] += 1
        rank = "" if incident.rank is None else f"-rank-{incident.rank}"
        stem = f"{incident.update:08d}-{incident.kind}{rank}"
        try:
            if not self._makes_folder and not folder.parent.exists():
                return None  # the first rank has removed it
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{stem}.txt"
            number = 1
            while path.exists():
                number += 1
                path = folder / f"{stem}-{number}.txt"
            path.write_text(_text(incident), encoding="utf-8")
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                print(f"evenstep: incidents can't be written to {folder}: {error}", file=sys.stderr, flush=True)
            return None
        return path


def _text(incident: Incident) -> str:
    rank = "" if incident.rank is None else f" on rank {incident.rank}"
    lines = [f"{incident.kind} at update {incident.update}{rank}", "", incident.message, ""]
    lines += [f"{name}: {json.dumps(value)}" for name, value in incident.facts().items()]
    if incident.traceback:
        lines += ["", incident.traceback.rstrip()]
    return "\n".join(lines) + "\n"
