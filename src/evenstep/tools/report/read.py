"""Reads a run folder. A file that is missing or broken becomes a sentence in `problems`."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field

from evenstep.errors import ArgumentError

CONFIG, METRICS, STATUS, INCIDENTS = "config.toml", "metrics.jsonl", "status.json", "incidents.jsonl"
_WHERE = ("name", "runs", "recipe", "resume")  # settings of the place of a run
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)

T = TypeVar("T")


def _in_utc(time: datetime) -> datetime:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)


Count = Annotated[int, Field(ge=0, lt=2**53)]
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

    def text(self, file: str) -> str:
        """Content of a file; "" where it can't be read."""
        try:
            return (self.folder / file).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            if file in (METRICS, STATUS):
                self.problems.append(f"`{file}` is missing.")
        except OSError as error:
            self.problems.append(f"`{file}` cannot be read: {error.strerror}.")
        return ""

    def parsed(self, file: str, parse: Callable[[str], T], text: str) -> T | None:
        """Parsed content of a file or a line; None where it is empty or broken."""
        if not text.strip():
            return None
        try:
            return parse(text)
        except _BROKEN:
            self.problems.append(f"`{file}` has content that cannot be read: `{text[:60]}`; it is left out.")
            return None


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, METRICS, STATUS))


def read_run(folder: Path) -> ReportedRun:
    """Read a run folder."""
    if not is_run(folder):
        raise ArgumentError(
            f"`{folder}` has no `{CONFIG}`, `{METRICS}` or `{STATUS}`; give a run folder.", field="folder"
        )
    run = ReportedRun(folder=folder)
    run.config = run.text(CONFIG)
    recorded = run.parsed("settings.json", lambda text: flat(json.loads(text)), run.text("settings.json"))
    run.settings = run.parsed(CONFIG, lambda text: flat(tomllib.loads(text)), run.config) or recorded or {}
    run.status = run.parsed(STATUS, Status.model_validate_json, run.text(STATUS)) or Status()
    for line in run.text(METRICS).split("\n"):
        update, values = run.parsed(METRICS, _values, line) or (0, {})
        for name, value in values.items():
            run.metrics.setdefault(name, {})[update] = value
    run.metrics = {name: dict(sorted(values.items())) for name, values in run.metrics.items()}
    lines = run.text(INCIDENTS).split("\n")
    found = [run.parsed(INCIDENTS, IncidentLine.model_validate_json, line) for line in lines]
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


def _values(line: str) -> tuple[int, dict[str, float]]:
    content = json.loads(line)
    update = content.pop("update")
    if type(update) is not int or not 0 <= update < 2**53:
        raise ValueError("no number of an update")
    return update, {name: float(value) for name, value in content.items()}  # also "nan" and "inf"
