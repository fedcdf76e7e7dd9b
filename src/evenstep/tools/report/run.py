"""Reads a run folder. A file that is missing or broken becomes a sentence in `problems`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from evenstep.errors import ArgumentError
from evenstep.tools.report.files import MAX_COUNT, Files
from evenstep.tools.report.shown import ShownItem, read_shown

CONFIG, METRICS, STATUS = "config.toml", "metrics.jsonl", "status.json"
METRICS_TABLE = "metrics.csv"  # read where there is no other
DEFAULTS, INCIDENTS, SHOWN = "defaults.toml", "incidents.jsonl", "shown.jsonl"

_NUMBERS = {
    "nan": float("nan"),
    "inf": float("inf"),
    "+inf": float("inf"),
    "-inf": float("-inf"),
    "infinity": float("inf"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentLine:
    """An incident as a line of `incidents.jsonl` tells it: a kind, a sentence, and facts."""

    update: int
    kind: str
    message: str
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLine:
    """A checkpoint as its manifest tells it."""

    name: str
    update: int
    created: str
    num_bytes: int
    is_latest: bool


@dataclass(slots=True, kw_only=True)
class ReportedRun:
    """What a run folder says.

    Args:
        metrics: name → update → value, by update; of a value that came twice the later one.
        checkpoints: the oldest first.
    """

    folder: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    config: str = ""
    defaults: str = ""
    status: dict[str, object] = field(default_factory=dict)
    incidents: list[IncidentLine] = field(default_factory=list)
    checkpoints: list[CheckpointLine] = field(default_factory=list)
    shown: list[ShownItem] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, METRICS, STATUS))


def read_run(folder: Path) -> ReportedRun:
    """Read a run folder."""
    if not is_run(folder):
        raise ArgumentError(
            f"`{folder}` has no `{CONFIG}`, `{METRICS}` or `{STATUS}`; give a run folder.", field="folder"
        )
    run = ReportedRun(folder=folder)
    files = Files(folder, run.problems)
    if files.has(CONFIG) or not files.has(STATUS):  # a run from a script has none
        run.config = files.text(CONFIG) or ""
    if files.has(DEFAULTS):
        run.defaults = files.text(DEFAULTS) or ""
    run.status = files.json_object(STATUS, "what became of the run is not known")
    _read_metrics(files, run)
    if files.has(INCIDENTS):
        run.incidents = [_incident(update, content) for update, content in files.lines(INCIDENTS)]
    _read_checkpoints(files, run)
    if files.has(SHOWN):
        run.shown = read_shown(files, SHOWN)
    return run


def number(value: object) -> float | None:
    """A metric's value, of a JSON number or of the words for what JSON lacks, or None.

    >>> number(2), number("-inf"), number(True), number("fast")
    (2.0, -inf, None, None)
    """
    if isinstance(value, str):
        return _NUMBERS.get(value.lower())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def moment(value: object) -> datetime | None:
    """A time as files write it; of anything else, and of one that no clock tells, None.

    >>> moment("2026-05-04T03:02:01"), moment("soon"), moment("0001-01-01T00:00:00+00:00")
    (datetime.datetime(2026, 5, 4, 3, 2, 1), None, None)
    """
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
        return found if found is None or found.astimezone(UTC).timestamp() > 0 else None
    except (ValueError, OverflowError):
        return None


def _read_metrics(files: Files, run: ReportedRun) -> None:
    metrics: dict[str, dict[int, float]] = {}
    if files.has(METRICS) or not files.has(METRICS_TABLE):
        for update, content in files.lines(METRICS):
            for name, value in content.items():
                found = None if name == "update" else number(value)
                if found is not None:
                    metrics.setdefault(name, {})[update] = found
    else:
        for update, name, value in files.rows(METRICS_TABLE):
            metrics.setdefault(name, {})[update] = value
    # late values, and those that a resumed run repeats, come out of order
    run.metrics = {name: dict(sorted(values.items())) for name, values in metrics.items()}


def _incident(update: int, content: Mapping[str, object]) -> IncidentLine:
    details = content.get("details")
    return IncidentLine(
        update=update,
        kind=str(content.get("kind", "incident")),
        message=str(content.get("message", "")),
        details=json.dumps(details, ensure_ascii=False) if details else "",
    )


def _read_checkpoints(files: Files, run: ReportedRun) -> None:
    latest = ""
    if (run.folder / "latest").is_file():
        latest = (files.text("latest") or "").strip()
    for path in sorted((run.folder / "checkpoints").glob("step-*/manifest.json")):
        name = path.parent.name
        content = files.json_object(f"checkpoints/{name}/manifest.json", "the checkpoint is left out")
        found = _checkpoint(content, name, latest)
        if found is not None:
            run.checkpoints.append(found)
        elif content:
            files.problems.append(f"`checkpoints/{name}/manifest.json` lacks fields: the checkpoint is left out.")


def _checkpoint(content: Mapping[str, object], name: str, latest: str) -> CheckpointLine | None:
    match content:
        case {"update": int(update), "created": str(created), "files": dict(listed)} if 0 <= update <= MAX_COUNT:
            size = sum(_size(entry) for entry in cast("dict[str, object]", listed).values())
            return CheckpointLine(name=name, update=update, created=created, num_bytes=size, is_latest=name == latest)
        case _:
            return None


def _size(entry: object) -> int:
    match entry:
        case {"bytes": int(size)} if 0 <= size <= MAX_COUNT:
            return size
        case _:
            return 0
