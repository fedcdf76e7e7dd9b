"""Writes a run's page: one HTML file that holds all it needs and asks nothing of a network.

Everything that comes from the run folder is text to the template, which escapes it; only the files beside this one
are trusted. The page forbids itself, by its content security policy, to load anything.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from evenstep.errors import EvenstepError
from evenstep.extras.report.charts import charts
from evenstep.extras.report.figures import (
    MetricFigures,
    duration_s,
    metric_figures,
    spell_bytes,
    spell_duration,
    spell_number,
)
from evenstep.extras.report.run import ReportedRun, number, read_run
from evenstep.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

REPORT = "report.html"

_HERE = Path(__file__).parent
_STATES = ("done", "running", "stopped", "failed")
_TRUSTED = {
    "page_css": "page.css",
    "page_js": "page.js",
    "plot_css": "vendor/uPlot.min.css",
    "plot_js": "vendor/uPlot.iife.min.js",
    "plot_license": "vendor/uPlot.LICENSE",
}
_MAX_METRIC_TILES = 4


def write_report(folder: Path | str) -> Path:
    """Write `report.html` into a run folder, from what is there, and return its path.

    A file that is missing or broken is said on the page.

    Raises:
        ArgumentError: `folder` is no run folder.
        EvenstepError: the page cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = (Path(run) / "metrics.jsonl").write_text('{"update": 1, "train/loss": 2.5}')
    ...     write_report(run).name
    'report.html'
    """
    run = read_run(Path(folder))
    path = run.folder / REPORT
    half = path.with_name(f".{REPORT}")
    try:
        half.write_text(_render(run), encoding="utf-8", errors="backslashreplace")
        half.replace(path)
    except OSError as error:
        raise EvenstepError(
            f"the report cannot be written to `{path}`: {error.strerror}; make room there, or make the folder writable."
        ) from error
    return path


def _render(run: ReportedRun) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=spell_number, bytes=spell_bytes, moment=_moment, plain=_plain, code=_code)
    drawn = charts(run.metrics)
    figures = metric_figures(run.metrics)
    return environment.get_template("page.html").render(
        run=run,
        name=run.folder.resolve().name,
        state=_state(run),
        reason=_reason(run),
        tiles=_tiles(run, figures),
        figures=figures,
        charts=drawn,
        chart_data=[asdict(chart) for chart in drawn],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        **{key: _trusted(path) for key, path in _TRUSTED.items()},
    )


def _trusted(path: str) -> "Markup":
    """A file of this package, to be put into the page as it is."""
    from markupsafe import Markup

    return Markup((_HERE / path).read_text(encoding="utf-8"))


def _state(run: ReportedRun) -> str:
    told = run.status.get("state")
    return str(told) if told in _STATES else "unknown"


def _reason(run: ReportedRun) -> str:
    """Why the run ended; of one that has not, when it was last heard of, as a killed one says nothing more."""
    reason, changed = run.status.get("reason"), run.status.get("changed")
    if reason is None and isinstance(changed, str):
        return f"last heard of at {_moment(changed)}"
    return str(reason or "")


def _tiles(run: ReportedRun, figures: Sequence[MetricFigures]) -> list[tuple[str, str, tuple[str, ...]]]:
    """The figures on top: label, value, notes."""
    tiles: list[tuple[str, str, tuple[str, ...]]] = []
    seen = max((max(values) for values in run.metrics.values()), default=None)
    update, planned = number(run.status.get("update")), number(run.status.get("updates"))
    if update is not None or seen is not None:
        of = (f"of {planned:,.0f}",) if planned is not None else ()
        tiles.append(("updates", f"{seen if update is None else update:,.0f}", of))
    seconds = duration_s(run)
    if seconds is not None:
        tiles.append(("duration", spell_duration(seconds), ("since its last start",)))
    judged = [figure for figure in figures if figure.best is not None]
    # the best of one training batch is luck; it stands on top only where nothing was evaluated
    evaluated = [figure for figure in judged if not figure.name.startswith("train/")]
    for figure in (evaluated or judged)[:_MAX_METRIC_TILES]:
        notes = f"best, at update {figure.best_update:,}", f"last {spell_number(figure.last)}"
        tiles.append((figure.name, spell_number(cast(float, figure.best)), notes))
    return tiles


def _moment(text: str) -> str:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return text


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _code(text: str) -> "Markup":
    """Escaped, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(
        part if position % 2 == 0 else Markup("<code>{}</code>").format(part) for position, part in enumerate(parts)
    )
