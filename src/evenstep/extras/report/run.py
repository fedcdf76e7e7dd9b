"""A run folder as values: what its files say, and what could not be read of them.

Reading never fails on a file: one that is missing, cut off or of another kind becomes a sentence in `problems`. How
it looks on the page is not decided here.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from evenstep.errors import ArgumentError, clause

CONFIG, METRICS, STATUS = "config.toml", "metrics.jsonl", "status.json"
METRICS_TABLE = "metrics.csv"  # read where there is no other
ENVIRONMENT, INCIDENTS = "environment.json", "incidents.jsonl"

_MAX_COUNT = 2**53  # the script of the page counts in floats
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
    num_files: int
    num_bytes: int
    is_latest: bool


@dataclass(slots=True, kw_only=True)
class ReportedRun:
    """What a run folder says.

    Args:
        metrics: name → update → value, by update; of a value that came twice the later one.
        config: the text of `config.toml`, empty if there is none.
        status: the fields of `status.json`.
        environment: the fields of `environment.json`.
        incidents: in the order in which they came.
        checkpoints: the oldest first.
        problems: a sentence for each thing that could not be read.
    """

    folder: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    config: str = ""
    status: dict[str, object] = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)
    incidents: list[IncidentLine] = field(default_factory=list)
    checkpoints: list[CheckpointLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_run(folder: Path) -> ReportedRun:
    """Read a run folder.

    Raises:
        ArgumentError: `folder` is not one, as it has neither a config, metrics nor a status.
    """
    if not any((folder / name).exists() for name in (CONFIG, METRICS, STATUS)):
        what = "holds none of them" if folder.is_dir() else "is not a folder"
        raise ArgumentError(
            f"`{folder}` must be a run folder, with `{CONFIG}`, `{METRICS}` or `{STATUS}`, but {what}; give the folder "
            f"that `evenstep train` printed."
        )
    run = ReportedRun(folder=folder)
    if (folder / CONFIG).exists() or not (folder / STATUS).exists():  # a run from a script has none
        run.config = _text(run, CONFIG) or ""
    run.status = _object(run, STATUS, "what became of the run is not known")
    if (folder / ENVIRONMENT).exists():
        run.environment = _object(run, ENVIRONMENT, "it is left out")
    _read_metrics(run)
    if (folder / INCIDENTS).exists():
        run.incidents = [_incident(update, content) for update, content in _lines(run, INCIDENTS)]
    _read_checkpoints(run)
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


def _text(run: ReportedRun, name: str) -> str | None:
    try:
        return (run.folder / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        run.problems.append(f"`{name}` is missing.")
    except OSError as error:
        run.problems.append(f"`{name}` cannot be read: {error.strerror}.")
    return None


def _object(run: ReportedRun, name: str, consequence: str) -> dict[str, object]:
    text = _text(run, name)
    if text is None:
        return {}
    content = _parse(text)
    if content is None:
        run.problems.append(f"`{name}` is not a JSON object: {consequence}.")
    return content or {}


def _parse(text: str) -> dict[str, object] | None:
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", content) if isinstance(content, dict) else None


def _read_metrics(run: ReportedRun) -> None:
    metrics: dict[str, dict[int, float]] = {}
    if (run.folder / METRICS).exists() or not (run.folder / METRICS_TABLE).exists():
        for update, content in _lines(run, METRICS):
            for name, value in content.items():
                found = None if name == "update" else number(value)
                if found is not None:
                    metrics.setdefault(name, {})[update] = found
    else:
        for update, name, value in _rows(run, METRICS_TABLE):
            metrics.setdefault(name, {})[update] = value
    # late values, and those that a resumed run repeats, come out of order
    run.metrics = {name: dict(sorted(values.items())) for name, values in metrics.items()}


def _lines(run: ReportedRun, name: str) -> Iterator[tuple[int, dict[str, object]]]:
    """The lines of a file of JSON objects that have an update."""
    bad: list[int] = []
    try:
        with (run.folder / name).open(encoding="utf-8", errors="replace") as file:
            for position, line in enumerate(file, start=1):
                content = _parse(line)
                update = content.get("update") if content else None
                if content is not None and type(update) is int and 0 <= update <= _MAX_COUNT:
                    yield update, content
                elif line.strip():
                    bad.append(position)
    except FileNotFoundError:
        run.problems.append(f"`{name}` is missing.")
    except OSError as error:
        run.problems.append(f"`{name}` cannot be read: {error.strerror}.")
    if bad:
        which = f"Line {bad[0]}" if len(bad) == 1 else f"Line {bad[0]} and {len(bad) - 1} others"
        run.problems.append(f"{which} of `{name}` cannot be read as a JSON object with an update: passed over.")


def _rows(run: ReportedRun, name: str) -> Iterator[tuple[int, str, float]]:
    """The rows of a table (update, name, value, weight)."""
    try:
        with (run.folder / name).open(encoding="utf-8", errors="replace", newline="") as file:
            for position, row in enumerate(csv.reader(file), start=1):
                try:
                    update, metric, value = int(row[0]), row[1], float(row[2])
                except (ValueError, IndexError):
                    if position > 1:  # the heading
                        run.problems.append(f"Line {position} of `{name}` cannot be read: passed over.")
                else:
                    yield update, metric, value
    except (OSError, csv.Error) as error:
        run.problems.append(f"`{name}` cannot be read: {clause(str(error))}.")


def _incident(update: int, content: Mapping[str, object]) -> IncidentLine:
    details = content.get("details")
    return IncidentLine(
        update=update,
        kind=str(content.get("kind", "incident")),
        message=str(content.get("message", "")),
        details=json.dumps(details, ensure_ascii=False) if details else "",
    )


def _read_checkpoints(run: ReportedRun) -> None:
    latest = ""
    if (run.folder / "latest").is_file():
        latest = (_text(run, "latest") or "").strip()
    for path in sorted((run.folder / "checkpoints").glob("step-*/manifest.json")):
        name = path.parent.name
        content = _object(run, f"checkpoints/{name}/manifest.json", "the checkpoint is left out")
        match content:
            case {"update": int(update), "created": str(created), "files": dict(files)} if 0 <= update <= _MAX_COUNT:
                sizes = [_size(entry) for entry in cast("dict[str, object]", files).values()]
                run.checkpoints.append(
                    CheckpointLine(
                        name=name,
                        update=update,
                        created=created,
                        num_files=len(sizes) + 1,
                        num_bytes=sum(sizes),
                        is_latest=name == latest,
                    )
                )
            case _ if content:
                run.problems.append(f"`checkpoints/{name}/manifest.json` lacks fields: the checkpoint is left out.")
            case _:
                continue  # said already


def _size(entry: object) -> int:
    match entry:
        case {"bytes": int(size)} if 0 <= size <= _MAX_COUNT:
            return size
        case _:
            return 0
