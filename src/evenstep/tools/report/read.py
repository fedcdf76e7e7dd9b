"""Reads a run folder. A file that is missing or broken becomes a sentence in `problems`."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from evenstep.errors import ArgumentError

CONFIG, METRICS, STATUS = "config.toml", "metrics.jsonl", "status.json"
_WHERE = ("name", "runs", "recipe", "resume")  # settings of the place of a run


def _in_utc(time: datetime) -> datetime:
    if not 1970 < time.year < 9999:
        raise ValueError("no clock tells this time")
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)


Count = Annotated[int, Field(ge=0, le=2**53)]
Moment = Annotated[datetime, AfterValidator(_in_utc)]


class Status(BaseModel):
    """status.json."""

    state: Literal["done", "running", "stopped", "failed", "unknown"] = "unknown"
    reason: str | None = None
    update: Count | None = None
    updates: Count | None = None
    started: Moment | None = None
    changed: Moment | None = None


class IncidentLine(BaseModel):
    """Line of incidents.jsonl."""

    update: Count
    kind: str = "incident"
    message: str = ""


T = TypeVar("T", bound=BaseModel)


@dataclass(slots=True, kw_only=True)
class ReportedRun:
    """Content of a run folder.

    Args:
        metrics: name → update → value, in the order of updates; the later one of two values of an update.
        config: text of the resolved run file; "" for a run of a script.
        settings: by dotted key, as text: those of the run file, or those that the trainer of a script has recorded.
    """

    folder: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    config: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    status: Status = field(default_factory=Status)
    incidents: list[IncidentLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def text(self, file: str, *, optional: bool = False) -> str:
        """Content of a file; "" where it can't be read."""
        if optional and not (self.folder / file).exists():
            return ""
        try:
            return (self.folder / file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self.problems.append(f"`{file}` cannot be read: {error.strerror}.")
            return ""

    def parsed(self, kind: type[T], file: str, text: str) -> T | None:
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            self.problems.append(f"`{file}` has content that cannot be read: `{text[:60]}`; it is left out.")
            return None

    def table(self, file: str, parse: Callable[[str], Any]) -> dict[str, str]:
        """Settings in a file, by dotted key."""
        text = self.text(file, optional=True)
        try:
            return flat(parse(text)) if text else {}
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.problems.append(f"`{file}` cannot be read; it is left out.")
            return {}


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, METRICS, STATUS))


def read_run(folder: Path) -> ReportedRun:
    """Read a run folder."""
    if not is_run(folder):
        raise ArgumentError(
            f"`{folder}` has no `{CONFIG}`, `{METRICS}` or `{STATUS}`; give a run folder.", field="folder"
        )
    run = ReportedRun(folder=folder)
    run.config = run.text(CONFIG, optional=True)
    run.settings = run.table("settings.json", json.loads)
    if run.config:
        run.settings = run.table(CONFIG, tomllib.loads)
    run.status = run.parsed(Status, STATUS, run.text(STATUS)) or Status()
    for update, name, value in _values(run):
        run.metrics.setdefault(name, {})[update] = value
    run.metrics = {name: dict(sorted(values.items())) for name, values in run.metrics.items()}
    file = "incidents.jsonl"
    lines = [line for line in run.text(file, optional=True).split("\n") if line.strip()]
    found = [run.parsed(IncidentLine, file, line) for line in lines]
    run.incidents = [one for one in found if one is not None]
    return run


def flat(table: Mapping[str, Any], outer: str = "") -> dict[str, str]:
    """Settings by dotted key, as text, without those that are not set or say where a run is.

    >>> flat({"seed": 1, "name": "a", "optimizer": {"lr": 0.1, "hooks": []}})
    {'seed': '1', 'optimizer.lr': '0.1'}
    """
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= flat(cast("dict[str, Any]", value), f"{outer}{key}.")
        elif value is not None and value != [] and f"{outer}{key}" not in _WHERE:
            found[f"{outer}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


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
