"""Reads a run folder. A file that is missing or broken becomes a sentence in `problems`."""

import base64
import csv
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from evenstep.errors import ArgumentError

CONFIG, METRICS, STATUS = "config.toml", "metrics.jsonl", "status.json"
KEPT = 6  # of what is shown, the newest of each name
_MAX_IMAGE_BYTES = 2_000_000
_WHERE = ("name", "runs", "recipe", "resume")  # settings that say where a run is, not what it does
_PNG = b"\x89PNG\r\n\x1a\n"

Row = tuple[str, tuple[str, ...]]
"""A key and its values in each of several runs, or in a run and by default; "" where it is not set."""


def _in_utc(time: datetime) -> datetime:
    if not 1970 < time.year < 9999:
        raise ValueError("no clock tells this time")
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)


Update = Annotated[int, Field(ge=0, le=2**53)]
Moment = Annotated[datetime, AfterValidator(_in_utc)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Finite = Annotated[float, Field(ge=-1e300, le=1e300)]


class Status(BaseModel):
    """status.json."""

    state: Literal["done", "running", "stopped", "failed", "unknown"] = "unknown"
    reason: str | None = None
    update: Update | None = None
    updates: Update | None = None
    started: Moment | None = None
    changed: Moment | None = None


class IncidentLine(BaseModel):
    """Line of incidents.jsonl."""

    update: Update
    kind: str = "incident"
    message: str = ""
    details: dict[str, Any] = Field(default_factory=dict)

    @property
    def facts(self) -> str:
        return json.dumps(self.details, ensure_ascii=False) if self.details else ""


class FileSize(BaseModel):
    """File of a checkpoint."""

    bytes: Count = 0


class Checkpoint(BaseModel):
    """Manifest of a checkpoint."""

    update: Update
    created: Moment
    files: dict[str, FileSize]
    name: str = ""
    is_latest: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class ShownItem(BaseModel):
    """Line of shown.jsonl: a text, an image as a `data:` address with a caption, or a histogram."""

    update: Update
    name: str
    kind: Literal["text", "image", "histogram"]
    text: str = ""
    file: str = ""
    caption: str = ""
    edges: list[Finite] = Field(default_factory=list)
    counts: list[Count] = Field(default_factory=list)
    image: str = ""


T = TypeVar("T", bound=BaseModel)


@dataclass(slots=True, kw_only=True)
class ReportedRun:
    """Content of a run folder.

    Args:
        metrics: name → update → value, in the order of updates; the later one of two values of an update.
        changed: settings that differ from the defaults, with these; None where one of both is unknown.
        checkpoints: the oldest first.
    """

    folder: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    config: str = ""
    changed: list[Row] | None = None
    status: Status = field(default_factory=Status)
    incidents: list[IncidentLine] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    shown: list[ShownItem] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def text(self, file: str) -> str:
        """Content of a file; "" where it can't be read."""
        try:
            return (self.folder / file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self.problems.append(f"`{file}` cannot be read: {error.strerror}.")
            return ""

    def has(self, file: str) -> bool:
        return (self.folder / file).exists()

    def parsed(self, kind: type[T], file: str, text: str) -> T | None:
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            self.problems.append(f"`{file}` has content that cannot be read: `{text[:60]}`; it is left out.")
            return None

    def lines(self, kind: type[T], file: str) -> Iterator[T]:
        for line in self.text(file).split("\n") if self.has(file) else []:
            item = self.parsed(kind, file, line) if line.strip() else None
            if item is not None:
                yield item


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, METRICS, STATUS))


def read_run(folder: Path) -> ReportedRun:
    """Read a run folder."""
    if not is_run(folder):
        raise ArgumentError(
            f"`{folder}` has no `{CONFIG}`, `{METRICS}` or `{STATUS}`; give a run folder.", field="folder"
        )
    run = ReportedRun(folder=folder)
    if run.has(CONFIG):  # a run from a script has none
        run.config = run.text(CONFIG)
        run.changed = from_defaults(run.config, run.text("defaults.toml") if run.has("defaults.toml") else "")
    run.status = run.parsed(Status, STATUS, run.text(STATUS)) or Status()
    table = not run.has(METRICS) and run.has("metrics.csv")
    for update, name, value in _rows(run, "metrics.csv") if table else _values(run):
        run.metrics.setdefault(name, {})[update] = value
    run.metrics = {name: dict(sorted(values.items())) for name, values in run.metrics.items()}
    run.incidents = list(run.lines(IncidentLine, "incidents.jsonl"))
    latest = run.text("latest").strip() if run.has("latest") else ""
    for path in sorted((folder / "checkpoints").glob("step-*/manifest.json")):
        manifest = str(path.relative_to(folder))
        found = run.parsed(Checkpoint, manifest, run.text(manifest))
        if found is not None:
            name = path.parent.name
            run.checkpoints.append(found.model_copy(update={"name": name, "is_latest": name == latest}))
    by_name: dict[str, list[ShownItem]] = {}
    for item in run.lines(ShownItem, "shown.jsonl"):
        by_name.setdefault(item.name, []).append(item)
    for name in sorted(by_name):
        for item in sorted(by_name[name], key=lambda item: item.update)[-KEPT:]:
            run.shown += _shown(run, item)
    return run


def _values(run: ReportedRun) -> Iterator[tuple[int, str, float]]:
    for line in run.text(METRICS).split("\n"):
        try:
            content = cast("dict[str, Any]", json.loads(line)) if line.strip() else {"update": 0}
            update = content.pop("update")
            if type(update) is not int or not 0 <= update < 2**53:
                raise TypeError
            values = [(name, float(value)) for name, value in content.items()]  # also "nan" and "inf"
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            run.problems.append(f"`{METRICS}` has a line that cannot be read: `{line[:60]}`; it is left out.")
            continue
        yield from ((update, name, value) for name, value in values)


def _rows(run: ReportedRun, file: str) -> Iterator[tuple[int, str, float]]:
    for position, row in enumerate(csv.reader(run.text(file).splitlines())):
        try:
            update, name, value = row[:3]
            yield int(update), name, float(value)
        except ValueError:
            if position:  # the heading
                run.problems.append(f"Line {position + 1} of `{file}` cannot be read; it is left out.")


def _shown(run: ReportedRun, item: ShownItem) -> list[ShownItem]:
    is_histogram = item.kind == "histogram" and item.counts and len(item.edges) == len(item.counts) + 1
    if item.kind == "text" or is_histogram:
        return [item]
    image = _image(run.folder, item.file)
    if not image:
        run.problems.append(f"The {item.kind} `{item.name}` of update {item.update} cannot be read; it is left out.")
    return [item.model_copy(update={"image": image})] if image else []


def _image(folder: Path, file: str) -> str:
    """Content of a PNG file inside the folder as a `data:` address, or ""."""
    path = (folder / file).resolve()
    try:
        is_small = path.is_relative_to(folder.resolve()) and path.stat().st_size <= _MAX_IMAGE_BYTES
        content = path.read_bytes() if is_small else b""
    except (OSError, ValueError):
        return ""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}" if content.startswith(_PNG) else ""


def from_defaults(config: str, defaults: str) -> list[Row] | None:
    """Settings of a run that differ from the defaults, each with its value and its default."""
    given, usual = _flat(config), _flat(defaults)
    if not given or not usual:
        return None
    differs = [key for key in given if given[key] != usual.get(key, "") and key not in _WHERE]
    return [(key, (given[key], usual.get(key, ""))) for key in differs]


def between(configs: Sequence[str]) -> list[Row]:
    """Settings in which runs differ."""
    each = [_flat(config) for config in configs]
    keys = dict.fromkeys(key for one in each for key in one if key not in _WHERE)
    rows = [(key, tuple(one.get(key, "") for one in each)) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def _flat(text: str) -> dict[str, str]:
    def keys(table: dict[str, Any], outer: str) -> Iterator[tuple[str, str]]:
        for key, value in table.items():
            if isinstance(value, dict):
                yield from keys(cast("dict[str, Any]", value), f"{outer}{key}.")
            elif value != []:
                yield f"{outer}{key}", value if isinstance(value, str) else json.dumps(value, default=str)

    try:
        return dict(keys(tomllib.loads(text), ""))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
